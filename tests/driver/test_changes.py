"""`snapshot` and `clean`: which changes are found, which are removed, which are reported."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_sandbox import wire

from tests.driver.peer import BOUND_SECONDS, DriverPeer, WireError, driver

pytestmark = pytest.mark.anyio


async def cleaned(peer: DriverPeer, since: dict[str, int], folder: Path, *excepted: Path) -> dict[str, Any]:
    """Clean this folder; the reply with paths relative to it."""
    with anyio.fail_after(BOUND_SECONDS):
        reply = await peer.request(
            wire.CLEAN, since=since, under=[str(folder)], **{"except": [str(path) for path in excepted]}
        )
    return {**reply, "paths": sorted(path.removeprefix(f"{folder}/") for path in reply["paths"])}


async def moment(peer: DriverPeer) -> dict[str, int]:
    return (await peer.request(wire.SNAPSHOT))["since"]


def image(folder: Path) -> None:
    """What a sandbox contains before its preprocess runs."""
    for name in ("usr/lib", "etc", "srv/__pycache__"):
        (folder / name).mkdir(parents=True)
    (folder / "etc/shells").write_text("/bin/sh")
    (folder / "etc/link").symlink_to("shells")
    (folder / "usr/lib/os.py").write_text("import sys")
    (folder / "srv/__pycache__/old.pyc").write_text("old")
    (folder / "srv/app.py").write_text("1")


def names(folder: Path, pattern: str = "*") -> set[str]:
    """The names of everything below a folder."""
    return {path.name for path in folder.rglob(pattern)}


def rewrite_unnoticed(folder: Path) -> None:
    """Change a file's content and restore its size and times."""
    file = folder / "etc/shells"
    before = file.stat()
    file.write_text("/bin/42")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def bind(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(path))
    return bound


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "nothing": (lambda folder: None, []),
    "new file": (lambda folder: (folder / "etc/new").write_text("42"), ["etc/new"]),
    "new empty file": (lambda folder: (folder / "etc/42").touch(), ["etc/42"]),
    "file in new folders": (
        lambda folder: ((folder / "a/b").mkdir(parents=True), (folder / "a/b/c").write_text("42")),
        ["a/b/c"],
    ),
    "new empty folder": (lambda folder: (folder / "etc/42").mkdir(), ["etc/42"]),
    "content with the old times": (rewrite_unnoticed, ["etc/shells"]),
    "mode": (lambda folder: (folder / "etc/shells").chmod(0o742), ["etc/shells"]),
    "time": (lambda folder: os.utime(folder / "etc/shells", (42, 42)), ["etc/shells"]),
    "attribute of a file": (
        lambda folder: os.setxattr(folder / "etc/shells", "user.a", b"42"),
        ["etc/shells"],
    ),
    "attribute of a folder": (lambda folder: os.setxattr(folder / "etc", "user.a", b"42"), ["etc"]),
    "hard link": (
        lambda folder: (folder / "etc/hard").hardlink_to(folder / "srv/app.py"),
        ["etc/hard", "srv/app.py"],
    ),
    "new link": (lambda folder: (folder / "etc/new").symlink_to("/no/42"), ["etc/new"]),
    "replaced link": (
        lambda folder: ((folder / "etc/link").unlink(), (folder / "etc/link").symlink_to("42")),
        ["etc/link"],
    ),
    "renamed file": (lambda folder: (folder / "etc/shells").rename(folder / "srv/42"), ["srv/42"]),
    "emptied folder": (lambda folder: (folder / "usr/lib/os.py").unlink(), ["usr/lib"]),
    "new FIFO": (lambda folder: os.mkfifo(folder / "etc/42"), ["etc/42"]),
    "socket without a process": (lambda folder: bind(folder / "etc/42").close(), ["etc/42"]),
    "deleted file": (lambda folder: (folder / "etc/shells").unlink(), []),
    "file that came and went": (
        lambda folder: ((folder / "etc/new").touch(), (folder / "etc/new").unlink()),
        [],
    ),
    "bytecode": (lambda folder: (folder / "srv/__pycache__/new.pyc").write_text("42"), []),
    "changed bytecode": (lambda folder: (folder / "srv/__pycache__/old.pyc").write_text("42"), []),
    "new folder of bytecode": (
        lambda folder: ((folder / "etc/__pycache__").mkdir(), (folder / "etc/__pycache__/a.pyc").touch()),
        [],
    ),
    "lock of an environment": (lambda folder: (folder / "usr/.lock").touch(), []),
    "lock with content": (lambda folder: (folder / "usr/.lock").write_text("42"), ["usr/.lock"]),
    "other file among bytecode": (
        lambda folder: (folder / "srv/__pycache__/answer").write_text("42"),
        ["srv/__pycache__/answer"],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_changes_outside_of_scratch_folders_are_reported(
    peer: DriverPeer, tmp_path: Path, change: str
) -> None:
    image(tmp_path)
    since = await moment(peer)
    make, paths = CHANGES[change]
    make(tmp_path)
    reply = await cleaned(peer, since, tmp_path)
    assert (reply["paths"], reply["count"]) == (paths, len(paths))
    assert names(tmp_path, "*.pyc") <= {"old.pyc"}


async def test_changes_before_the_snapshot_do_not_count(peer: DriverPeer, tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"old-{number}").write_text("")
    since = await moment(peer)
    (tmp_path / "new").write_text("")
    assert (await cleaned(peer, since, tmp_path))["paths"] == ["new"]


async def test_every_change_after_the_snapshot_counts(peer: DriverPeer, tmp_path: Path) -> None:
    for _ in range(20):
        since = await moment(peer)
        (tmp_path / "file").write_text("")
        assert (await cleaned(peer, since, tmp_path))["paths"] == ["file"]


async def test_scratch_folders_are_emptied_of_changes(python: str, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "old").mkdir(parents=True)
    (scratch / "old/unchanged").write_text("")
    (scratch / "old/changed").write_text("")
    async with driver(python, {"TMPDIR": str(scratch)}) as peer:
        since = await moment(peer)
        (scratch / "old/changed").write_text("42")
        (scratch / "42/deep").mkdir(parents=True)
        (scratch / "42/deep/file").write_text("42")
        (scratch / "link").symlink_to("/no/42")
        os.mkfifo(scratch / "fifo")
        bind(scratch / "socket").close()
        (tmp_path / "file").write_text("42")
        assert await cleaned(peer, since, tmp_path) == {"removed": 5, "paths": ["file"], "count": 1}
    assert names(scratch) == {"old", "unchanged"}


async def test_folder_for_temporary_files_of_these_tests_is_not_the_drivers(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be above all folders of the tests."""
    monkeypatch.setenv("TMPDIR", str(tmp_path.parent))
    async with driver(python) as peer:
        since = await moment(peer)
        (tmp_path / "file").write_text("42")
        assert (await cleaned(peer, since, tmp_path))["paths"] == ["file"]


async def test_socket_of_a_living_process_is_not_removed(python: str, tmp_path: Path) -> None:
    async with driver(python, {"TMPDIR": str(tmp_path)}) as peer:
        since = await moment(peer)
        with bind(tmp_path / "socket"):
            assert (await cleaned(peer, since, tmp_path))["paths"] == ["socket"]
        assert (await cleaned(peer, since, tmp_path))["removed"] == 1


async def test_changed_folders_get_the_present_time(peer: DriverPeer, tmp_path: Path) -> None:
    image(tmp_path)
    since = await moment(peer)
    os.utime(tmp_path / "etc", (42, 42))
    os.utime(tmp_path, (42, 42))
    assert (await cleaned(peer, since, tmp_path))["paths"] == []
    assert min(os.stat(path).st_mtime for path in (tmp_path, tmp_path / "etc")) > 1e9  # noqa: PTH116


async def test_excepted_paths_do_not_count(peer: DriverPeer, tmp_path: Path) -> None:
    since = await moment(peer)
    (tmp_path / "workspace/deep").mkdir(parents=True)
    (tmp_path / "workspace/deep/file").write_text("42")
    (tmp_path / "workspace-2").write_text("42")
    (tmp_path / "token").write_text("42")
    reply = await cleaned(peer, since, tmp_path, tmp_path / "workspace", tmp_path / "token")
    assert reply == {"removed": 0, "paths": ["workspace-2"], "count": 1}
    assert (tmp_path / "workspace/deep/file").exists()


async def test_links_are_not_followed(python: str, tmp_path: Path) -> None:
    outside, scratch = tmp_path / "outside", tmp_path / "scratch"
    outside.mkdir()
    scratch.mkdir()
    async with driver(python, {"TMPDIR": str(scratch)}) as peer:
        since = await moment(peer)
        (outside / "file").write_text("42")
        (scratch / "link").symlink_to(outside)
        assert await cleaned(peer, since, scratch) == {"removed": 1, "paths": [], "count": 0}
    assert (outside / "file").exists()


async def test_the_first_hundred_paths_are_named(peer: DriverPeer, tmp_path: Path) -> None:
    since = await moment(peer)
    for number in range(150):
        (tmp_path / f"file-{number}").write_text("")
    reply = await cleaned(peer, since, tmp_path)
    assert (len(reply["paths"]), reply["count"]) == (100, 150)


async def test_names_that_are_no_text_are_reported(peer: DriverPeer, tmp_path: Path) -> None:
    since = await moment(peer)
    (tmp_path / os.fsdecode(b"a\xff\nb")).write_text("")
    assert (await cleaned(peer, since, tmp_path))["paths"] == ["a\\xff\nb"]


async def test_a_clock_that_was_set_back_is_an_error(peer: DriverPeer, tmp_path: Path) -> None:
    since = await moment(peer)
    since["offset_ns"] += 10**9
    with pytest.raises(WireError, match="clock was set back") as failed:
        await cleaned(peer, since, tmp_path)
    assert failed.value.reason == "files"


async def test_a_cancelled_cleaning_stops(peer: DriverPeer, tmp_path: Path) -> None:
    since = await moment(peer)
    for number in range(20_000):
        (tmp_path / f"file-{number}").write_text("")
    request = await peer.begin(wire.CLEAN, since=since, under=[str(tmp_path)])
    await peer.cancel(request)
    with pytest.raises(WireError) as failed:
        await peer.result(request)
    assert failed.value.reason == "cancelled"


async def test_folders_of_other_users_are_skipped(peer: DriverPeer, tmp_path: Path) -> None:
    since = await moment(peer)
    (tmp_path / "closed").mkdir(mode=0)
    assert stat.S_IMODE((tmp_path / "closed").stat().st_mode) == 0
    reply = await cleaned(peer, since, tmp_path)
    # Root can look inside.
    assert reply["paths"] == (["closed"] if os.geteuid() == 0 else [])
    shutil.rmtree(tmp_path / "closed")


def process(script: str, *arguments: str, **params: Any) -> dict[str, Any]:
    return {
        "argv": [sys.executable, "-S", "-c", script, *arguments],
        "cwd": "/",
        "env": {},
        "inherit": "all",
        "timeout_seconds": 60,
        "output_bytes": 1000,
        "channel": False,
        "leave": True,
        **params,
    }


START = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', *sys.argv[1:]])"


async def test_processes_that_keep_running_are_counted(peer: DriverPeer) -> None:
    program = process(START, "import time; time.sleep(1000)", peer.token, linger_seconds=0.1)
    assert (await peer.request(wire.RUN, **program))["background"] == 1
    assert len(peer.living()) == 1
    assert (await peer.request(wire.RUN, **process("pass")))["background"] == 0


async def test_processes_that_end_within_the_linger_time_are_not_counted(peer: DriverPeer) -> None:
    program = process(START, "import time; time.sleep(0.2)", peer.token, linger_seconds=BOUND_SECONDS)
    with anyio.fail_after(BOUND_SECONDS / 2):
        assert (await peer.request(wire.RUN, **program))["background"] == 0


async def test_run_cancelled_while_its_processes_linger_kills_them(peer: DriverPeer) -> None:
    request = await peer.begin(
        wire.RUN, **process(START, "import time; time.sleep(1000)", peer.token, linger_seconds=1000)
    )
    await peer.until_living(1)
    # The first process ends soon; the cancellation may come before or after that.
    await anyio.sleep(0.2)
    await peer.cancel(request)
    with pytest.raises(WireError) as failed:
        await peer.result(request)
    assert failed.value.reason == "cancelled"
    await peer.until_living(0)
