"""`arrange`: file operations."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from decathlon_sandbox import wire

from tests.driver.peer import DriverPeer, WireError

pytestmark = pytest.mark.anyio


async def arrange(peer: DriverPeer, *steps: dict[str, Any]) -> None:
    assert await peer.request(wire.ARRANGE, steps=steps) == {}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def arrange_error(peer: DriverPeer, *steps: dict[str, Any]) -> WireError:
    """Run steps that must fail; return the error."""
    with pytest.raises(WireError) as error:
        await arrange(peer, *steps)
    assert error.value.reason == "files"
    return error.value


async def test_steps_run_in_order(peer: DriverPeer, tmp_path: Path) -> None:
    at = str(tmp_path)
    await arrange(
        peer,
        {"make": f"{at}/a/b"},
        {"make": f"{at}/a/b"},
        {"write": f"{at}/a/b/file.txt", "text": "é\n"},
        {"write": f"{at}/c/run", "text": "#!/bin/sh\n", "mode": 0o755},
        {"copy": f"{at}/a", "to": f"{at}/d/e"},
        {"remove": f"{at}/a"},
        {"remove": f"{at}/never/was"},
    )
    assert (tmp_path / "d/e/b/file.txt").read_text() == "é\n"
    assert (tmp_path / "d/e/b/file.txt").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "c/run").stat().st_mode & 0o777 == 0o755
    assert names(tmp_path) == ["c", "d"]


async def test_first_failing_step_stops_the_request_and_is_named(peer: DriverPeer, tmp_path: Path) -> None:
    error = await arrange_error(
        peer,
        {"make": f"{tmp_path}/one"},
        {"copy": f"{tmp_path}/none", "to": f"{tmp_path}/two"},
        {"make": f"{tmp_path}/three"},
    )
    assert error.message == f"No such file or directory: {tmp_path}/none"
    assert error.data == {"step": 1}
    assert names(tmp_path) == ["one"]


async def test_unknown_step_fails_before_anything_is_done(peer: DriverPeer, tmp_path: Path) -> None:
    with pytest.raises(WireError, match="no such step: burn") as error:
        await arrange(peer, {"make": f"{tmp_path}/one"}, {"burn": "/"})
    assert error.value.reason == "bad_params"
    assert names(tmp_path) == []


async def test_copy_keeps_links_modes_and_existing_files(peer: DriverPeer, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "folder").mkdir(parents=True)
    (source / "folder/run").write_text("new")
    (source / "folder/run").chmod(0o751)
    (source / "dangling").symlink_to("/no/where")
    (source / "loop").symlink_to(".")
    (target / "folder").mkdir(parents=True)
    (target / "folder/kept").write_text("old")
    (target / "folder/run").write_text("old")
    await arrange(peer, {"copy": str(source), "to": str(target)})
    assert (target / "dangling").readlink() == Path("/no/where")
    assert (target / "loop").readlink() == Path()
    assert (target / "folder/run").read_text() == "new"
    assert (target / "folder/run").stat().st_mode & 0o777 == 0o751
    assert (target / "folder/kept").read_text() == "old"


async def test_copy_replaces_links_and_never_writes_through_them(peer: DriverPeer, tmp_path: Path) -> None:
    source, target, outside = tmp_path / "source", tmp_path / "target", tmp_path / "outside"
    for folder in (source / "sub", target, outside):
        folder.mkdir(parents=True)
    (source / "file").write_text("new")
    (source / "sub/file").write_text("new")
    (outside / "file").write_text("untouched")
    (target / "file").symlink_to(outside / "file")
    (target / "sub").symlink_to(outside)
    await arrange(
        peer, {"copy": str(source), "to": str(target)}, {"write": str(target / "file"), "text": "newer"}
    )
    assert (outside / "file").read_text() == "untouched"
    assert (target / "sub/file").read_text() == "new"
    assert (target / "file").read_text() == "newer"


async def test_write_replaces_a_link_and_leaves_no_partial_file(peer: DriverPeer, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("untouched")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "folder").mkdir()
    await arrange(peer, {"write": f"{tmp_path}/link", "text": "new"})
    await arrange_error(peer, {"write": f"{tmp_path}/folder", "text": "new"})
    assert (tmp_path / "outside").read_text() == "untouched"
    assert names(tmp_path) == ["folder", "link", "outside"]


async def test_copy_error_names_the_file(peer: DriverPeer, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "source/socket"))
        error = await arrange_error(peer, {"copy": f"{tmp_path}/source", "to": f"{tmp_path}/target"})
    assert "source/socket is neither file, folder nor link" in error.message
    error = await arrange_error(peer, {"copy": str(tmp_path), "to": f"{tmp_path}/a/b"})
    assert "is inside" in error.message


async def test_remove_of_a_link_keeps_its_target(peer: DriverPeer, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "tree").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "tree/link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept/file").write_text("kept")
    await arrange(peer, {"remove": f"{tmp_path}/link"}, {"remove": f"{tmp_path}/tree"})
    assert names(tmp_path) == ["kept"]
    assert (tmp_path / "kept/file").read_text() == "kept"


async def test_folder_without_permissions_is_removed(peer: DriverPeer, tmp_path: Path) -> None:
    (tmp_path / "tree/closed/inner").mkdir(parents=True)
    (tmp_path / "tree/closed/inner/file").touch()
    (tmp_path / "tree/closed/inner").chmod(0)
    (tmp_path / "tree/closed").chmod(0)
    await arrange(peer, {"remove": f"{tmp_path}/tree"})
    assert names(tmp_path) == []


async def test_copy_keeps_contents_and_times(peer: DriverPeer, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    big, empty = tmp_path / "source/big", tmp_path / "source/empty"
    big.write_bytes(os.urandom(1 << 20) * 20)
    empty.touch()
    os.utime(empty, ns=(1_000_000_001, 2_000_000_002))
    await arrange(peer, {"copy": f"{tmp_path}/source", "to": f"{tmp_path}/target"})
    assert (tmp_path / "target/big").read_bytes() == big.read_bytes()
    assert (tmp_path / "target/empty").stat().st_mtime_ns == 2_000_000_002


async def test_absent_checks_names_and_paths(peer: DriverPeer, tmp_path: Path) -> None:
    (tmp_path / "a/evaluation").mkdir(parents=True)
    (tmp_path / "a/other").mkdir()
    (tmp_path / "a/link").symlink_to(tmp_path)
    under = {"under": str(tmp_path)}
    error = await arrange_error(peer, {"absent": ["evaluation"], **under})
    assert error.data == {"path": f"{tmp_path}/a/evaluation", "step": 0}
    assert (await arrange_error(peer, {"absent": [f"{tmp_path}/a/other"], **under})).data[
        "path"
    ] == f"{tmp_path}/a/other"
    await arrange(
        peer,
        {"absent": ["evaluation"], **under, "except": [f"{tmp_path}/a/evaluation/"]},
        {"absent": ["evaluation"], **under, "except": [f"{tmp_path}/a"]},
        {"absent": ["evaluatio", "other.txt", "/a/other"], **under},
        {"absent": ["evaluation"], "under": f"{tmp_path}/nowhere"},
    )
    assert (await arrange_error(peer, {"absent": ["link"], **under})).data["path"] == f"{tmp_path}/a/link"


async def test_absent_resolves_links(peer: DriverPeer, tmp_path: Path) -> None:
    (tmp_path / "real/secret").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real/other").symlink_to("secret")
    for under in ("", "/link", "/real"):
        error = await arrange_error(
            peer, {"absent": [f"{tmp_path}/link/secret"], "under": f"{tmp_path}{under}"}
        )
        assert error.data["path"] == f"{tmp_path}/real/secret"
    error = await arrange_error(peer, {"absent": [f"{tmp_path}/link/other/"], "under": str(tmp_path)})
    assert error.data["path"] == f"{tmp_path}/real/other"
    await arrange(
        peer, {"absent": [f"{tmp_path}/link/secret"], "under": str(tmp_path), "except": [f"{tmp_path}/link"]}
    )


async def test_file_names_that_are_not_utf8_are_handled(peer: DriverPeer, tmp_path: Path) -> None:
    strange = tmp_path / "source" / os.fsdecode(b"\xff")
    strange.parent.mkdir()
    strange.touch()
    await arrange(peer, {"copy": f"{tmp_path}/source", "to": f"{tmp_path}/target"})
    assert names(tmp_path / "target") == [strange.name]
    strange.unlink()
    os.mkfifo(strange)
    error = await arrange_error(peer, {"copy": f"{tmp_path}/source", "to": f"{tmp_path}/target"})
    assert "source/? is neither" in error.message


async def test_large_copy_does_not_block_and_can_be_cancelled(peer: DriverPeer, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in range(40):
        (source / str(folder)).mkdir(parents=True)
        for file in range(100):
            (source / str(folder) / str(file)).write_bytes(b"")
    number = await peer.begin(
        wire.ARRANGE, steps=[{"copy": str(source), "to": f"{tmp_path}/{count}"} for count in range(100)]
    )
    assert await peer.request(wire.PING) == {}
    assert number not in peer.lines
    await peer.cancel(number)
    with pytest.raises(WireError) as error:
        await peer.result(number)
    assert error.value.reason == "cancelled"
    assert not (tmp_path / "99").exists()
