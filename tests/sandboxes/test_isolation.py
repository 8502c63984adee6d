"""Isolation of local sandboxes is found out once for a state folder, and never becomes less by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from decathlon_client import Decathlon

from decathlon_mcp.errors import ProviderUnavailableError, SettingsError
from decathlon_mcp.sandboxes.host import isolation as host_isolation
from decathlon_mcp.sandboxes.host.host_files import HostFiles
from decathlon_mcp.sandboxes.host.isolation import (
    FILE_NAME,
    HostIsolation,
    decide_isolation,
    why_no_own_network,
    why_unavailable,
)
from tests.sandboxes.test_removal import few_descriptors
from tests.survival.servers import supervised_server
from tests.survival.test_restart import assert_nothing_left

FAILURES = {
    "no process": "bwrap: Can't fork for pid 1: Resource temporarily unavailable",
    "too many namespaces": "bwrap: Creating new namespace failed: nesting depth or "
    "/proc/sys/user/max_*_namespaces exceeded (ENOSPC)",
    "killed": "",
}
REFUSALS = (
    "bwrap: No permissions to create new namespace, likely because the kernel does not allow",
    "bwrap: setting up uid map: Permission denied",
)


class Bubblewrap:
    """A `bwrap` that fails as often as `fail` says, and is the machine's own otherwise."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o777)  # it runs as the sandboxes' user
        self._failures = folder / "failures"
        self.program = folder / "bwrap"
        self.fail(0, "")
        self.program.write_text(
            f'#!/bin/sh\ncase "$*" in *--version*) exec {shutil.which("bwrap")} "$@";; esac\n'
            f'left=$(head -n 1 {self._failures})\nif [ "$left" -gt 0 ]; then\n'
            f"  {{ echo $((left - 1)); tail -n +2 {self._failures}; }} > {folder}/next\n"
            f"  cat {folder}/next > {self._failures}\n  tail -n +2 {self._failures} >&2\n"
            f'  [ "$(tail -n +2 {self._failures})" ] || kill -9 $$\n  exit 1\nfi\n'
            f'exec {shutil.which("bwrap")} "$@"\n'
        )
        self.program.chmod(0o755)

    def fail(self, times: int, message: str) -> None:
        self._failures.write_text(f"{times}\n{message}" + ("\n" if message else ""))
        self._failures.chmod(0o666)

    @property
    def failures_left(self) -> int:
        return int(self._failures.read_text().split("\n")[0])


@pytest.fixture
def bubblewrap(namespaces: None, monkeypatch: pytest.MonkeyPatch) -> Generator[Bubblewrap]:
    # Not pytest's folder, which root alone can enter.
    with TemporaryDirectory() as folder:
        made = Bubblewrap(Path(folder))
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(host_isolation, "PROBE_PAUSE_SECONDS", 0.01)
        why_unavailable.cache_clear()
        yield made
    why_unavailable.cache_clear()


@pytest.mark.parametrize("message", FAILURES.values(), ids=FAILURES)
def test_a_probe_that_fails_is_tried_again(bubblewrap: Bubblewrap, message: str) -> None:
    bubblewrap.fail(2, message)
    assert why_unavailable() is None
    assert bubblewrap.failures_left == 0


def test_a_probe_that_always_fails_means_no_isolation_to_nobody(
    bubblewrap: Bubblewrap, tmp_path: Path
) -> None:
    bubblewrap.fail(1000, FAILURES["no process"])
    with pytest.raises(
        ProviderUnavailableError, match=r"could not be found out in 3 tries: .*--isolation none"
    ):
        decide_isolation("auto", tmp_path, list)
    bubblewrap.fail(0, "")
    assert decide_isolation("auto", tmp_path, list).isolation == "namespaces"


@pytest.mark.parametrize("message", REFUSALS)
def test_a_kernel_that_cannot_isolate_means_none_at_the_first_start_alone(
    bubblewrap: Bubblewrap, tmp_path: Path, message: str
) -> None:
    bubblewrap.fail(1000, message)
    found = decide_isolation("auto", tmp_path, list)
    assert (found.isolation, bubblewrap.failures_left) == ("none", 999)
    assert found.why is not None
    assert message in found.why
    HostIsolation("namespaces").keep(tmp_path)
    with pytest.raises(SettingsError, match=f"served with sandboxes in namespaces.*remove .*{FILE_NAME}"):
        decide_isolation("auto", tmp_path, list)
    assert decide_isolation("none", tmp_path, list) == HostIsolation("none")


def test_a_python_that_was_named_by_a_relative_path_is_found_in_the_namespaces(tmp_path: Path) -> None:
    # The folder before `..` is not there inside.
    python = Path(os.path.relpath(sys.executable, tmp_path))
    imported = f"from {HostFiles.__module__} import HostFiles"
    code = f"{imported}; print(HostFiles.of_this_server().environment)"
    shown = subprocess.run([python, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert f"{Path(sys.executable).parent}:" in shown.stdout
    assert ".." not in shown.stdout


@pytest.mark.usefixtures("own_network", "bubblewrap")
def test_a_machine_without_descriptors_for_a_moment_still_isolates() -> None:
    why_no_own_network.cache_clear()
    for ask in (why_unavailable, why_no_own_network):
        with few_descriptors(0), pytest.raises(ProviderUnavailableError, match="Too many open files"):
            ask()
        assert ask() is None


@pytest.mark.usefixtures("own_network")
def test_a_network_of_its_own_is_not_lost_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bwrap", "setpriv", "nsenter", "ip", "sh", "python3"):
        (programs / name).symlink_to(str(shutil.which(name)))
    decide_isolation("auto", tmp_path, list).keep(tmp_path)
    monkeypatch.setenv("PATH", str(programs))
    for mode in ("auto", "namespaces"):
        why_no_own_network.cache_clear()
        with pytest.raises(SettingsError, match=r"networks of their own.*there is no slirp4netns"):
            decide_isolation(mode, tmp_path, list)
    (tmp_path / FILE_NAME).unlink()
    assert "no slirp4netns" in (decide_isolation("auto", tmp_path, list).why_shared or "")
    why_no_own_network.cache_clear()


@pytest.mark.parametrize("content", [b'{"isolation": "some"}', b"[" * 100_000], ids=len)
def test_what_is_kept_and_cannot_be_read_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(SettingsError, match=f"{FILE_NAME}.* cannot be read: .*remove it"):
        decide_isolation("auto", tmp_path, list)


@pytest.mark.usefixtures("namespaces")
def test_user_namespaces_that_are_forbidden_are_a_kernel_that_cannot(tmp_path: Path) -> None:
    program = f"from {why_unavailable.__module__} import why_unavailable; print(why_unavailable())"
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    unshare = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh"]
    command = [*unshare, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.stdout.startswith("bubblewrap created no sandbox: "), done


@pytest.mark.anyio
@pytest.mark.long
async def test_restart_whose_probe_fails_continues_the_episodes_in_namespaces(
    bubblewrap: Bubblewrap, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    async with supervised_server(state) as server:
        async with Decathlon(server.url) as client, client.episode("find-answer") as episode:
            await episode.call("probe__write", {"path": "answer.txt", "text": "42"})
            # Two starts of the server fail, and the third one has a failure too.
            bubblewrap.fail(7, FAILURES["no process"])
            await server.kill()
            assert (await episode.call("probe__read", {"path": "answer.txt"})).text == "42"
            verdict = await episode.evaluate()
            assert (verdict.reward, verdict.raw["isolation"]) == (1.0, "namespaces")
    assert bubblewrap.failures_left == 0
    await assert_nothing_left(state)


@pytest.mark.anyio
@pytest.mark.long
async def test_episodes_without_isolation_are_continued_where_it_became_possible(
    bubblewrap: Bubblewrap, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    bubblewrap.fail(1, REFUSALS[0])
    async with supervised_server(state) as server:
        async with Decathlon(server.url) as client, client.episode("find-answer") as episode:
            await episode.call("probe__write", {"path": "answer.txt", "text": "42"})
            await server.kill()
            assert (await episode.call("probe__read", {"path": "answer.txt"})).text == "42"
            assert (await episode.evaluate()).raw["isolation"] == "none"
    async with supervised_server(state) as server:
        async with Decathlon(server.url) as client, client.episode("find-answer") as episode:
            assert (await episode.evaluate()).raw["isolation"] == "namespaces"
    await assert_nothing_left(state)
