"""Small archives go over the driver's connection, others by the provider's own `put` and `get`."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from decathlon_sandbox import wire

from decathlon_mcp.archives.reading import Kind
from decathlon_mcp.driver.client import DriverClient, connect
from decathlon_mcp.driver.transfers import SENT_BYTES, get_archive, put_archive
from decathlon_mcp.errors import BadRequestError, DriverError
from decathlon_mcp.plugins.conformance.target import file_entry, link_entry, pack, read_archive
from decathlon_mcp.sandboxes.base import Sandbox
from tests.sandboxes.conftest import Bench

pytestmark = pytest.mark.anyio


class Noting:
    """A sandbox that notes the use of the provider's own archives."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.used: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("put", "get"):
            self.used.append(name)
        return getattr(self._sandbox, name)


@asynccontextmanager
async def opened(bench: Bench) -> AsyncGenerator[tuple[Any, DriverClient]]:
    async with bench.provider.open(bench.spec()) as sandbox, connect(sandbox) as driver:
        yield Noting(sandbox), driver


async def test_driver_moves_small_archives_itself(local: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.tar"
    async with opened(local) as (sandbox, driver):
        for content in (b"1", b"2"):
            archive = pack(file_entry("file", content, mode=0o755), link_entry("link", "file"))
            await put_archive(sandbox, driver, sandbox.root / "a", archive)
        await get_archive(sandbox, driver, sandbox.root / "a", out, 1 << 20)
        members = {member.name: (member, content) for member, content in read_archive(out)}
        assert (members["file"][0].mode & 0o777, members["file"][1]) == (0o755, b"2")
        assert (members["link"][0].kind, members["link"][0].link) == (Kind.SYMLINK, "file")
        await get_archive(sandbox, driver, sandbox.root / "not" / "here", out, 1 << 20)
        assert [*read_archive(out)] == []
        assert sandbox.used == []


async def test_what_the_driver_does_not_take_is_left_to_the_provider(local: Bench, tmp_path: Path) -> None:
    async with opened(local) as (sandbox, driver):
        with pytest.raises(BadRequestError, match="outside"):
            await put_archive(sandbox, driver, sandbox.root, pack(file_entry("../outside")))
        await put_archive(sandbox, driver, sandbox.root, pack(file_entry("file")))
        with pytest.raises(BadRequestError, match="cannot unpack"):
            await put_archive(sandbox, driver, sandbox.root, pack(file_entry("file/x")))
        assert sandbox.used == ["put"]
        large = pack(file_entry("large", bytes(SENT_BYTES + 1)))
        await put_archive(sandbox, driver, sandbox.root, large)
        await get_archive(sandbox, driver, sandbox.root, tmp_path / "out.tar", 4 << 20)
        assert sandbox.used == ["put", "put", "get"]


async def test_no_link_that_is_there_leads_the_driver_out(local: Bench, tmp_path: Path) -> None:
    """The driver does not follow it; whether the provider does is its own affair, inside the sandbox."""
    outside = tmp_path / "outside"
    outside.mkdir()
    async with opened(local) as (sandbox, driver):
        await put_archive(sandbox, driver, sandbox.root, pack(link_entry("way", str(outside))))
        tar = base64.b64encode(pack(file_entry("way/file", b"x"))).decode()
        with pytest.raises(DriverError) as refused:
            await driver.arrange({"unpack": str(sandbox.root), "tar": tar})
    assert refused.value.data["reason"] == "files"
    assert list(outside.iterdir()) == []


class LyingDriver:
    """A driver whose archive is `packed`."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    async def request(self, method: str, params: Any, *, kind: Any) -> Any:
        assert method == wire.PACK
        return kind(tar=self._packed)


@pytest.mark.parametrize("packed", [b"x" * 600, pack(file_entry("a", b"1"))[:512]])
async def test_an_invalid_archive_of_a_driver_is_its_error(tmp_path: Path, packed: bytes) -> None:
    sandbox: Any = None
    driver: Any = LyingDriver(packed)
    with pytest.raises(DriverError, match="invalid archive"):
        await get_archive(sandbox, driver, PurePosixPath("/a"), tmp_path / "out.tar", 1 << 20)
    assert not (tmp_path / "out.tar").exists()
