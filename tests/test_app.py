"""Tests of the composition root."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.app import (
    bootstrap,
    host_info,
    image_for,
    provider_for,
    read_catalogue,
)
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import NotRunnableError, SettingsError
from decathlon_mcp.grading.evaluation import is_graded
from decathlon_mcp.sandboxes.host.isolation import why_no_own_network
from decathlon_mcp.settings import Settings, read_settings
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.suite_file import read_suite_file
from tests.probe.serving import SUITE


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A state folder that no other test has served, which would keep its isolation."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def settings(**values: Any) -> Settings:
    return read_settings({"suite": (SUITE,), **values})


def test_the_starter_suite_is_local_by_default_and_a_checkout_needs_docker() -> None:
    (starter,) = read_catalogue(read_settings({})).suites
    assert provider_for(starter, settings()) == "host"
    assert provider_for(starter, settings(provider="docker")) == "docker"


def checkout_of_toolathlon() -> Suite:
    """The probe suite, as if it had Toolathlon's profile."""
    (suite,) = read_catalogue(settings()).suites
    return replace(suite, profile=replace(suite.profile, name="toolathlon"))


def test_a_folder_as_image_is_for_bubblewrap() -> None:
    (starter,) = read_catalogue(read_settings({})).suites
    checkout = checkout_of_toolathlon()
    unpacked = settings(image="/images/mine")
    assert provider_for(starter, unpacked) == "host"
    assert provider_for(checkout, unpacked) == "host"
    assert image_for(starter, unpacked) is None
    assert image_for(checkout, unpacked) == "/images/mine"
    assert image_for(checkout, settings(image="./mine")) == str(Path("mine").absolute())
    assert "outbound" in host_info([checkout], unpacked).without_network[checkout.name]
    assert provider_for(checkout, settings(image="some/image")) == "docker"
    assert image_for(checkout, settings(image="some/image")) == "some/image"
    for kernel in (None, "gvisor"):
        chosen = {"provider": "host", "kernel": kernel}
        assert image_for(checkout, settings(**chosen)) is None
        assert (
            image_for(starter, settings(**chosen, image="/images/mine", isolation="auto")) == "/images/mine"
        )


def test_an_image_that_the_provider_cannot_use_is_an_error() -> None:
    for provider, image, message in (
        ("docker", "/images/mine", "is a folder"),
        ("host", "ubuntu", "is no folder"),
    ):
        with pytest.raises(SettingsError, match=message):
            image_for(checkout_of_toolathlon(), settings(provider=provider, image=image))


@pytest.mark.anyio
async def test_tasks_can_be_prepared_only_where_sandboxes_can_be_saved(tmp_path: Path) -> None:
    message = "^--prepared: sandboxes of the provider host cannot be saved; use .*--kernel gvisor$"
    with pytest.raises(SettingsError, match=message):
        async with bootstrap(settings(prepared=True, state=tmp_path)):
            pass


@pytest.fixture
def without_slirp4netns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespaces: None) -> Iterator[None]:
    """A machine with the programs for namespaces, and none for a network of their own."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bwrap", "setpriv", "nsenter", "ip", "sh", "python3"):
        (programs / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(programs))
    why_no_own_network.cache_clear()
    yield
    why_no_own_network.cache_clear()


@pytest.fixture
def suite_with_network(tmp_path: Path) -> str:
    suite = shutil.copytree(SUITE, tmp_path / "suite")
    file = suite / "suite.yaml"
    file.write_text(file.read_text().replace("tasks:\n", "tasks:\n  find-answer: {network: true}\n"))
    return str(suite)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("values", "runs"),
    [
        ({"isolation": "namespaces"}, False),
        ({"isolation": "namespaces", "tokens": "tokens"}, True),
        ({"isolation": "none"}, True),
    ],
    ids=["without tokens", "with tokens", "without isolation"],
)
async def test_task_whose_agent_would_share_the_loopback_of_a_server_without_tokens_does_not_run(
    suite_with_network: str, tmp_path: Path, without_slirp4netns: None, values: dict[str, Any], runs: bool
) -> None:
    state = tmp_path / "state"
    configured = settings(suite=(suite_with_network,), provider="host", state=state, **values)
    async with bootstrap(configured) as registry:
        if not runs:
            message = r"has no tokens.*there is no slirp4netns on the PATH: install .*, or set --tokens"
            with pytest.raises(NotRunnableError, match=message):
                registry.start("find-answer", Principal())
            return
        episode = registry.start("find-answer", Principal())
        await episode.ready()
        assert not registry.start("say-answer", Principal()).state.ending


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"provider": "host", "isolation": "namespaces"}, "install slirp4netns"),
        ({"provider": "docker", "provider_option": ("network=host",)}, "leave out .*, or set --tokens"),
        ({"provider": "host", "image": "/images/mine"}, "no outbound network"),
    ],
)
def test_a_network_that_reaches_a_server_without_tokens_cannot_be_given_to_all(
    without_slirp4netns: None, values: dict[str, Any], message: str
) -> None:
    configured = settings(**values, network="outbound")
    with pytest.raises(SettingsError, match=f"^--network outbound: .*{message}"):
        read_catalogue(configured)


def test_a_server_with_tokens_may_give_this_machines_network(without_slirp4netns: None) -> None:
    for values in ({"provider": "host"}, {"provider": "docker", "provider_option": ("network=host",)}):
        assert read_catalogue(settings(**values, network="outbound", tokens="tokens")).suites


@pytest.mark.anyio
async def test_the_state_folder_is_private_and_afterwards_scratch_is_empty_and_episodes_have_ended(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    async with bootstrap(settings(provider="host", isolation="none", state=state)) as registry:
        assert [len(list((state / name).iterdir())) for name in ("servers", "scratch")] == [1, 1]
        episode = registry.start("find-answer", Principal())
    assert episode.state.ending == "the server shut down"
    assert registry.live == []
    for folder in (state, state / "episodes"):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert [len(list((state / name).iterdir())) for name in ("servers", "scratch")] == [0, 0]


@pytest.mark.anyio
async def test_files_of_a_dead_server_are_removed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    sandbox = state / "sandboxes" / "box"
    for folder in (state / "servers", state / "scratch" / "dead-archives", sandbox):
        folder.mkdir(parents=True)
    (state / "servers" / "dead").touch()
    (sandbox / "owner").write_text("dead")
    async with bootstrap(settings(provider="host", isolation="none", state=state)):
        assert not (state / "servers" / "dead").exists()
        assert not (state / "scratch" / "dead-archives").exists()
        assert not sandbox.exists()


@pytest.mark.anyio
async def test_a_state_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(SettingsError, match="--state: /sys/decathlon cannot be used"):
        async with bootstrap(settings(provider="host", state="/sys/decathlon")):
            pass


def test_upstreams_suites_do_not_grade_truncated_attempts_unless_set(tmp_path: Path) -> None:
    for profile, graded in (
        ("profile: toolathlon", False),
        ("profile: starter", True),
        ("{profile: toolathlon, grades_truncated: true}", True),
    ):
        (tmp_path / "suite.yaml").write_text(f"{profile}\n")
        (probe,) = read_catalogue(settings()).suites
        suite = replace(probe, profile=read_suite_file(tmp_path)[0])
        assert is_graded(suite, "calls") is graded
