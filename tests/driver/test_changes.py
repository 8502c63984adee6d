"""Which changes since a snapshot are found, which are removed, which are reported."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decathlon_sandbox.changes import Cleaning, snapshot
from decathlon_sandbox.driver_requests import RequestError


@pytest.fixture(autouse=True)
def no_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for temporary files of these tests can be above all folders of the tests."""
    monkeypatch.delenv("TMPDIR", raising=False)


def cleaned(since: dict[str, int], folder: Path, *excepted: Path) -> dict[str, Any]:
    """Clean this folder; the reply with paths relative to it."""
    params = {"since": since, "under": [str(folder)], "except": [str(path) for path in excepted]}
    reply = Cleaning(params).run()
    return {**reply, "paths": sorted(path.removeprefix(f"{folder}/") for path in reply["paths"])}


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
    "content with the old times": (rewrite_unnoticed, ["etc/shells"]),
    "mode": (lambda folder: (folder / "etc/shells").chmod(0o742), ["etc/shells"]),
    "time": (lambda folder: os.utime(folder / "etc/shells", (42, 42)), ["etc/shells"]),
    "attribute of a file": (
        lambda folder: os.setxattr(folder / "etc/shells", "user.a", b"42"),
        ["etc/shells"],
    ),
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
    "deleted file": (lambda folder: (folder / "etc/shells").unlink(), []),
    "bytecode": (lambda folder: (folder / "srv/__pycache__/new.pyc").write_text("42"), []),
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
def test_changes_outside_of_scratch_folders_are_reported(tmp_path: Path, change: str) -> None:
    image(tmp_path)
    since = snapshot()
    make, paths = CHANGES[change]
    make(tmp_path)
    reply = cleaned(since, tmp_path)
    assert (reply["paths"], reply["count"]) == (paths, len(paths))
    assert names(tmp_path, "*.pyc") <= {"old.pyc"}


def test_changes_before_the_snapshot_do_not_count_and_every_later_one_does(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"old-{number}").touch()
        since = snapshot()
        (tmp_path / "file").write_text("")
        assert cleaned(since, tmp_path)["paths"] == ["file"]


def test_scratch_folders_are_emptied_of_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, outside = tmp_path / "scratch", tmp_path / "outside"
    (scratch / "old").mkdir(parents=True)
    outside.mkdir()
    (scratch / "old/unchanged").write_text("")
    (scratch / "old/changed").write_text("")
    monkeypatch.setenv("TMPDIR", str(scratch))
    since = snapshot()
    (scratch / "old/changed").write_text("42")
    (scratch / "42/deep").mkdir(parents=True)
    (scratch / "42/deep/file").write_text("42")
    (scratch / "link").symlink_to(outside)  # and is not followed
    os.mkfifo(scratch / "fifo")
    bind(scratch / "socket").close()
    (outside / "file").write_text("42")
    assert cleaned(since, tmp_path) == {"removed": 5, "paths": ["outside/file"], "count": 1}
    assert names(scratch) == {"old", "unchanged"}


def test_socket_of_a_living_process_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    since = snapshot()
    with bind(tmp_path / "socket"):
        assert cleaned(since, tmp_path)["paths"] == ["socket"]
    assert cleaned(since, tmp_path)["removed"] == 1


def test_changed_folders_get_the_present_time(tmp_path: Path) -> None:
    image(tmp_path)
    since = snapshot()
    os.utime(tmp_path / "etc", (42, 42))
    os.utime(tmp_path, (42, 42))
    assert cleaned(since, tmp_path)["paths"] == []
    assert min(os.stat(path).st_mtime for path in (tmp_path, tmp_path / "etc")) > 1e9  # noqa: PTH116


def test_excepted_paths_do_not_count(tmp_path: Path) -> None:
    since = snapshot()
    (tmp_path / "workspace/deep").mkdir(parents=True)
    (tmp_path / "workspace/deep/file").write_text("42")
    (tmp_path / "workspace-2").write_text("42")
    (tmp_path / "token").write_text("42")
    reply = cleaned(since, tmp_path, tmp_path / "workspace", tmp_path / "token")
    assert reply == {"removed": 0, "paths": ["workspace-2"], "count": 1}
    assert (tmp_path / "workspace/deep/file").exists()


def test_the_first_hundred_paths_are_named_also_those_that_are_no_text(tmp_path: Path) -> None:
    since = snapshot()
    (tmp_path / os.fsdecode(b"a\xff\nb")).write_text("")
    assert cleaned(since, tmp_path)["paths"] == ["a\\xff\nb"]
    for number in range(150):
        (tmp_path / f"file-{number}").write_text("")
    reply = cleaned(since, tmp_path)
    assert (len(reply["paths"]), reply["count"]) == (100, 151)


def test_a_clock_that_was_set_back_is_an_error(tmp_path: Path) -> None:
    since = snapshot()
    since["offset_ns"] += 10**9
    with pytest.raises(RequestError, match="clock was set back"):
        cleaned(since, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_names_of_mount_points_may_have_other_separators_of_lines_and_words(tmp_path: Path) -> None:
    (point := tmp_path / "a\u2028b\u3000c\rd").mkdir()
    program = (
        "import sys; from decathlon_sandbox.changes import Cleaning, snapshot; "
        "print(Cleaning({'since': snapshot(), 'under': sys.argv[1:], 'except': []}).run()['paths'])"
    )
    script = 'mount -t tmpfs none "$1" && exec "$2" -c "$3" "$4"'
    arguments = ("sh", "-c", script, "sh", str(point), sys.executable, program, str(tmp_path))
    done = subprocess.run(["unshare", "--mount", *arguments], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
