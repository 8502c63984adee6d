"""Providers of other packages: found by their entry points, and selected by a setting."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.app import bootstrap, check_provider, host_info, read_catalogue
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.hooks import GROUP, plugins
from decathlon_mcp.plugins.gc import collect
from decathlon_mcp.sandboxes.plugins import context_of, create_provider, load_provider
from decathlon_mcp.settings import Settings, read_settings
from tests.docs.pages import below, block
from tests.probe.serving import SUITE

PAGE = "docs/extending.md"
PLUGINS = """
from contextlib import asynccontextmanager
from pathlib import Path
from decathlon_mcp.sandboxes.host.provider import HostProvider
from pydantic import BaseModel, Field
from decathlon_mcp.hooks import Plugin
from decathlon_mcp.sandboxes.plugins import Offer, ProviderPlugin

class Options(BaseModel):
    note: str = Field(description="a file to write")
    level: int = Field(1, ge=1, description="a number")

class Mine(HostProvider):
    name = "mine"

class Renamed(HostProvider):
    name = "other"

def create(context):
    Path(context.options.note).write_text(str(context.folder))
    return Mine(context.owner, context.folder, isolation="none")

MINE = ProviderPlugin(
    create, Options, survives=False, offer=lambda context, image: Offer(without_network="it is offline")
)
@asynccontextmanager
async def broken(state):
    raise ValueError("a fault of the plug-in")
    yield

FAULTY = ProviderPlugin(create, Options, inventory=broken)
RENAMED = ProviderPlugin(lambda context: Renamed(context.owner, context.folder))
CLASS = Mine

def plugin(name, **providers):
    return Plugin(name=name, providers={name: f"{__name__}:{part}" for name, part in providers.items()})

PLUGIN = plugin("mine", mine="MINE")
BROKEN = plugin("broken", mine="MINE", broken="MISSING", **{"class": "CLASS"})
RENAMING = plugin("renaming", mine="RENAMED")
TAKEN = plugin("taken", docker="MINE")
ASKED = plugin("asked", silent="MINE", faulty="FAULTY")
"""
Install = Callable[[str, str, dict[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a module and its entry points as a package, until the test ends."""

    def install(module: str, code: str, entry_points: dict[str, str]) -> None:
        site = tmp_path / "site"
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]) + "\n")
        monkeypatch.setattr(sys, "path", [str(site), *sys.path])
        monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()
        plugins.cache_clear()

    yield install
    monkeypatch.undo()
    plugins.cache_clear()


def settings(**values: Any) -> Settings:
    return read_settings({"suite": (SUITE,), **values})


@pytest.mark.anyio
async def test_the_provider_of_another_package_runs_an_episode(install: Install, tmp_path: Path) -> None:
    install("mine_package", PLUGINS, {"mine": "mine_package:PLUGIN"})
    note, state = tmp_path / "note", tmp_path / "state"
    folder = state / "providers" / "mine"
    configured = settings(provider="mine", provider_option=(f"note={note}",), state=state)
    # It cannot survive, so that nothing is stored for a next server.
    async with bootstrap(configured, serves=True) as registry:
        episode = registry.start("find-answer", Principal())
        with anyio.fail_after(60):
            await episode.state.reach(Phase.READY)
        assert note.read_text() == str(folder)
        assert len(list(folder.iterdir())) == 1
        assert registry.store is None
    assert list(folder.iterdir()) == []


def test_tasks_that_need_a_network_cannot_run_where_a_plugin_has_none(install: Install) -> None:
    install("mine_package", PLUGINS, {"mine": "mine_package:PLUGIN"})
    configured = settings(provider="mine", provider_option=("note=none",))
    suites = read_catalogue(configured).suites
    assert host_info(suites, configured).without_network == {suites[0].name: "it is offline"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"provider": "nope"},
            r"no such provider, only broken, class, docker, host, mine, podman",
        ),
        ({"provider": "broken"}, r"MISSING cannot be loaded \(AttributeError"),
        ({"provider": "class"}, "is a type, and not a ProviderPlugin"),
        ({"provider": "mine", "provider_option": ("colour=red",)}, "takes these options: note: a file"),
        ({"provider": "mine"}, "^--provider mine needs --provider-option note=VALUE: a file to write$"),
        (
            {"provider": "mine", "provider_option": ("note=a", "level=0")},
            "^--provider-option level: .*at least 1",
        ),
        ({"provider": "host", "provider_option": ("note=a",)}, "the provider host takes no options"),
    ],
)
def test_a_provider_or_option_that_cannot_be_used_is_an_error_that_says_why(
    values: dict[str, Any], message: str, install: Install
) -> None:
    install("mine_package", PLUGINS, {"broken": "mine_package:BROKEN"})
    with pytest.raises(SettingsError, match=message):
        check_provider(settings(**values))


def test_a_provider_that_lacks_something_is_refused_with_the_names(install: Install) -> None:
    code = PLUGINS.replace("class Mine(HostProvider):", "class Mine:\n    def __init__(self, *_, **__): ...")
    install("mine_package", code, {"mine": "mine_package:PLUGIN"})
    with pytest.raises(
        SettingsError, match=r"^--provider mine: its provider lacks check, environment, is_ava"
    ):
        create_provider("mine", "owner", settings(provider="mine", provider_option=("note=/dev/null",)))


def test_a_provider_may_pass_on_what_another_has(install: Install) -> None:
    begin = "class Mine:\n    def __init__(self, *a, **k):\n        self.inner = HostProvider(*a, **k)\n"
    code = PLUGINS.replace(
        "class Mine(HostProvider):",
        f"{begin}    def __getattr__(self, name):\n        return getattr(self.inner, name)\n",
    )
    install("mine_package", code, {"mine": "mine_package:PLUGIN"})
    create_provider("mine", "owner", settings(provider="mine", provider_option=("note=/dev/null",)))


def test_two_packages_with_providers_of_one_name_are_ambiguous(install: Install) -> None:
    install("mine_package", PLUGINS, {"mine": "mine_package:PLUGIN"})
    install("second_package", PLUGINS, {"renaming": "second_package:RENAMING"})
    with pytest.raises(SettingsError, match="two providers named mine, mine_package:MINE and second_"):
        check_provider(settings(provider="mine"))


def test_a_plug_in_cannot_replace_a_provider_of_the_core(install: Install) -> None:
    install("mine_package", PLUGINS, {"taken": "mine_package:TAKEN"})
    with pytest.raises(SettingsError, match="two providers named docker"):
        check_provider(settings(provider="docker"))


@pytest.mark.anyio
async def test_gc_asks_the_other_providers_if_a_plug_in_cannot_say_what_is_left(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("mine_package", PLUGINS, {"asked": "mine_package:ASKED"})
    dead = {"0123456789ab": "faulty", "1123456789ab": "silent", "2123456789ab": "host"}
    (tmp_path / "servers").mkdir()
    (tmp_path / "sandboxes").mkdir(mode=0o700)
    for server, name in dead.items():
        (tmp_path / "servers" / server).write_text(json.dumps({"providers": [name]}))
        (tmp_path / "sandboxes" / f"box-{server}").mkdir()
        (tmp_path / "sandboxes" / f"box-{server}" / "owner").write_text(server)
    assert await collect(tmp_path, dry_run=False, abandon=True, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["unreachable"] == {
        "faulty": "ValueError('a fault of the plug-in')",
        "silent": "its plug-in does not say what servers leave behind",
    }
    assert {file.name for file in (tmp_path / "servers").iterdir()} == {"0123456789ab", "1123456789ab"}
    assert "2123456789ab" in {removed["server"] for removed in report["removed"]}


@pytest.mark.anyio
async def test_the_package_on_the_page_works_as_printed(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads(block(PAGE, "A provider", "toml").text)["project"]
    code = next(each.text for each in below(PAGE, "A provider", "python") if "PLUGIN" in each.text)
    install("second_engine", code, project["entry-points"][GROUP])
    address = f"unix://{tmp_path}/none.sock"
    with pytest.raises(SettingsError, match="--provider-option address="):
        create_provider("second-engine", "owner", settings(provider="second-engine", state=tmp_path))
    configured = settings(provider="second-engine", provider_option=(f"address={address}",), state=tmp_path)
    plugin = load_provider("second-engine")
    assert plugin.begin is not None
    plugin.begin(context_of("second-engine", "owner", configured))
    async with create_provider("second-engine", "owner", configured) as provider:
        (engine,) = await provider.check(None)
    assert not engine.ok
    assert f"no Docker engine answers at {address}" in engine.detail
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "0123456789ab").write_text(json.dumps({"providers": ["second-engine"]}))
    assert await collect(tmp_path, dry_run=False, abandon=False, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert f"no Docker engine answers at {address}" in report["unreachable"]["second-engine"]


@pytest.mark.anyio
async def test_gc_asks_each_podman_service_that_servers_have_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = load_provider("podman")
    assert plugin.begin is not None
    for socket in ("/nowhere/one.sock", "/nowhere/two.sock", "/nowhere/one.sock"):
        configured = settings(provider="podman", provider_option=(f"socket={socket}",), state=tmp_path)
        plugin.begin(context_of("podman", "", configured))
    assert len(list((tmp_path / "providers" / "podman").iterdir())) == 2
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "0123456789ab").write_text(json.dumps({"providers": ["podman"]}))
    assert await collect(tmp_path, dry_run=False, abandon=True, as_json=True) == 0
    assert "/nowhere/one.sock" in json.loads(capsys.readouterr().out)["unreachable"]["podman"]
    assert (tmp_path / "servers" / "0123456789ab").exists()
