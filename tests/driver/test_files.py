"""`arrange`, `pack`, `snapshot` and `clean` of a driver, and each step of `arrange`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decathlon_sandbox import wire
from decathlon_sandbox.driver_requests import RequestError
from decathlon_sandbox.files import run_steps

from tests.driver.peer import DriverPeer, WireError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def failure(*steps: dict[str, Any]) -> RequestError:
    """Run steps that must fail; return the error."""
    with pytest.raises(RequestError) as error:
        run_steps(steps)
    assert error.value.code == wire.FILES
    return error.value


@pytest.mark.anyio
async def test_steps_run_in_order_until_one_fails(peer: DriverPeer, tmp_path: Path) -> None:
    at = str(tmp_path)
    await peer.request(
        wire.ARRANGE,
        steps=[
            {"make": f"{at}/a/b"},
            {"make": f"{at}/a/b"},
            {"write": f"{at}/a/b/file.txt", "text": "é\n"},
            {"copy": f"{at}/a", "to": f"{at}/d/e"},
            {"remove": f"{at}/a"},
            {"remove": f"{at}/never/was"},
        ],
    )
    assert (tmp_path / "d/e/b/file.txt").read_text() == "é\n"
    assert (tmp_path / "d/e/b/file.txt").stat().st_mode & 0o777 == 0o644
    packed = (await peer.request(wire.PACK, folder=at, max_bytes=100_000))["tar"]
    with pytest.raises(WireError) as error:
        await peer.request(
            wire.ARRANGE,
            steps=[
                {"unpack": f"{at}/one", "tar": packed},
                {"copy": f"{at}/none", "to": f"{at}/two"},
                {"make": f"{at}/three"},
            ],
        )
    assert error.value.reason == "files"
    assert error.value.message == f"No such file or directory: {at}/none"
    assert error.value.data == {"step": 1}
    assert names(tmp_path) == ["d", "one"]
    assert (tmp_path / "one/d/e/b/file.txt").read_text() == "é\n"


def test_copy_keeps_links_modes_and_existing_files(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "folder").mkdir(parents=True)
    (source / "folder/run").write_text("new")
    (source / "folder/run").chmod(0o751)
    (source / "dangling").symlink_to("/no/where")
    (source / "loop").symlink_to(".")
    (target / "folder").mkdir(parents=True)
    (target / "folder/kept").write_text("old")
    (target / "folder/run").write_text("old")
    run_steps([{"copy": str(source), "to": str(target)}])
    assert (target / "dangling").readlink() == Path("/no/where")
    assert (target / "loop").readlink() == Path()
    assert (target / "folder/run").read_text() == "new"
    assert (target / "folder/run").stat().st_mode & 0o777 == 0o751
    assert (target / "folder/kept").read_text() == "old"


def test_copy_replaces_links_and_never_writes_through_them(tmp_path: Path) -> None:
    source, target, outside = tmp_path / "source", tmp_path / "target", tmp_path / "outside"
    for folder in (source / "sub", target, outside):
        folder.mkdir(parents=True)
    (source / "file").write_text("new")
    (source / "sub/file").write_text("new")
    (outside / "file").write_text("untouched")
    (target / "file").symlink_to(outside / "file")
    (target / "sub").symlink_to(outside)
    run_steps([{"copy": str(source), "to": str(target)}, {"write": str(target / "file"), "text": "newer"}])
    assert (outside / "file").read_text() == "untouched"
    assert (target / "sub/file").read_text() == "new"
    assert (target / "file").read_text() == "newer"


def test_write_replaces_a_link_and_leaves_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("untouched")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "folder").mkdir()
    run_steps([{"write": f"{tmp_path}/link", "text": "new"}])
    failure({"write": f"{tmp_path}/folder", "text": "new"})
    assert (tmp_path / "outside").read_text() == "untouched"
    assert names(tmp_path) == ["folder", "link", "outside"]


def test_remove_of_a_link_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "tree").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "tree/link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept/file").write_text("kept")
    run_steps([{"remove": f"{tmp_path}/link"}, {"remove": f"{tmp_path}/tree"}])
    assert names(tmp_path) == ["kept"]
    assert (tmp_path / "kept/file").read_text() == "kept"


def test_folder_without_permissions_is_removed(tmp_path: Path) -> None:
    (tmp_path / "tree/closed/inner").mkdir(parents=True)
    (tmp_path / "tree/closed/inner/file").touch()
    (tmp_path / "tree/closed/inner").chmod(0)
    (tmp_path / "tree/closed").chmod(0)
    run_steps([{"remove": f"{tmp_path}/tree"}])
    assert names(tmp_path) == []


def test_absent_checks_names(tmp_path: Path) -> None:
    (tmp_path / "a/evaluation").mkdir(parents=True)
    (tmp_path / "a/link").symlink_to(tmp_path)
    under = {"under": str(tmp_path)}
    for name in ("evaluation", "link"):
        data = failure({"absent": ["other", name], **under}).data
        assert data == {"path": f"{tmp_path}/a/{name}", "step": 0}
    run_steps([{"absent": ["evaluatio", "other.txt"], **under}])
    run_steps([{"absent": ["evaluation"], "under": f"{tmp_path}/nowhere"}])
