"""The server `files`: its tools, and confinement to the workspace."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator

import pytest

from tests.starter.bench import Server, serving

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def files(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Server]:
    workspace = tmp_path_factory.mktemp("files") / "workspace"
    workspace.mkdir()
    (workspace.parent / "secret.txt").write_text("not yours")
    async with serving("files", workspace) as server:
        yield server


async def test_what_was_written_is_read_back_line_by_line(files: Server) -> None:
    await files.call_ok("write_file", path="a/b/poem.txt", text="one\r\ntwo\nthree\n")
    assert (files.workspace / "a" / "b" / "poem.txt").read_bytes() == b"one\r\ntwo\nthree\n"
    assert await files.call_ok("read_file", path="a/b/poem.txt") == "one\r\ntwo\nthree\n"
    part = await files.call_ok("read_file", path=str(files.workspace / "a/b/poem.txt"), first_line=2, lines=1)
    assert part.startswith("two\n")
    assert "first_line=3" in part
    assert "only 3 lines" in await files.call_error("read_file", path="a/b/poem.txt", first_line=9)


async def test_an_edit_must_be_unambiguous(files: Server) -> None:
    await files.call_ok("write_file", path="edit.txt", text="red red blue")
    assert "occurs 2 times" in await files.call_error("edit_file", path="edit.txt", old="red", new="green")
    assert "does not occur" in await files.call_error("edit_file", path="edit.txt", old="grey", new="green")
    await files.call_ok("edit_file", path="edit.txt", old="blue", new="green")
    await files.call_ok("edit_file", path="edit.txt", old="red", new="blue", every=True)
    assert await files.call_ok("read_file", path="edit.txt") == "blue blue green"


async def test_a_move_makes_folders_and_never_overwrites(files: Server) -> None:
    await files.call_ok("write_file", path="from.txt", text="x")
    await files.call_ok("move_file", source="from.txt", destination="deep/er/to.txt")
    await files.call_ok("write_file", path="from.txt", text="y")
    refused = await files.call_error("move_file", source="from.txt", destination="deep/er/to.txt")
    assert "exists already" in refused
    assert "into itself" in await files.call_error("move_file", source="deep", destination="deep/er/deep")
    assert "nothing to move" in await files.call_error("move_file", source=".", destination="elsewhere")
    await files.call_ok("delete_file", path="from.txt")
    assert "not deleted" in await files.call_error("delete_file", path="deep")


async def test_folders_are_shown_as_a_tree_and_searched(files: Server) -> None:
    await files.call_ok("write_file", path="tree/one.csv", text="Ünder\n")
    await files.call_ok("write_file", path="tree/sub/two.txt", text="under\n")
    await files.call_ok("make_directory", path="tree/.git/objects")
    shown = await files.call_ok("list_directory", path="tree")
    assert shown.splitlines() == [".git/", "one.csv  7", "sub/", "  two.txt  6"]
    assert await files.call_ok("search_files", text="under", path="tree") == "tree/sub/two.txt:1: under"
    assert "one.csv:1" in await files.call_ok("search_files", text="üNDER", path="tree", ignore_case=True)
    assert "no line" in await files.call_ok("search_files", text="under", path="tree", name="*.csv")
    assert hashlib.sha256(b"under\n").hexdigest() in await files.call_ok("file_info", path="tree/sub/two.txt")


@pytest.mark.parametrize("path", ["../secret.txt", "/etc/passwd", "link/secret.txt"])
async def test_nothing_outside_the_workspace_is_touched(files: Server, path: str) -> None:
    link = files.workspace / "link"
    if not link.is_symlink():
        link.symlink_to(files.workspace.parent)
    (files.workspace / "mine.txt").write_text("mine")
    outside = "outside the workspace"
    for tool in ("read_file", "file_info", "list_directory", "delete_file", "make_directory"):
        assert outside in await files.call_error(tool, path=path)
    assert outside in await files.call_error("write_file", path=path, text="mine now")
    assert outside in await files.call_error("edit_file", path=path, old="not", new="now")
    assert outside in await files.call_error("move_file", source="mine.txt", destination=path)
    assert outside in await files.call_error("move_file", source=path, destination="got.txt")
    assert outside in await files.call_error("search_files", text="yours", path=path)
    assert "yours" not in await files.call_ok("search_files", text="yours")
    assert (files.workspace.parent / "secret.txt").read_text() == "not yours"


async def test_binary_and_large_files_are_refused(files: Server) -> None:
    (files.workspace / "picture.png").write_bytes(b"\x89PNG\xff")
    (files.workspace / "giant.txt").write_bytes(b"x" * (1024 * 1024 + 1))
    assert "not a UTF-8" in await files.call_error("read_file", path="picture.png")
    assert "larger than" in await files.call_error("read_file", path="giant.txt")
    assert "no file" in await files.call_error("read_file", path="nowhere.txt")
    assert "not a usable path" in await files.call_error("read_file", path="a\0b")
    assert "in the way" in await files.call_error("write_file", path="picture.png/x.txt", text="")
