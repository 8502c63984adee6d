"""Archives over the driver's connection do what the providers' own `put` and `get` do."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from decathlon_sandbox import wire

from decathlon_mcp.archives.reading import Kind, Member
from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.driver.archives import SENT_BYTES, get_archive, put_archive
from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.errors import DriverError
from decathlon_mcp.plugins.conformance.suite import Check, files
from decathlon_mcp.plugins.conformance.target import download, file_entry, link_entry, pack
from decathlon_mcp.sandboxes.base import Provider, Sandbox, SandboxSpec
from tests.sandboxes.conftest import Bench

pytestmark = pytest.mark.anyio

# What the driver does itself, and what it leaves to the provider or refuses like it.
BY_THE_DRIVER: Sequence[Check] = (
    files.files_survive_a_round_trip,
    files.unpacking_replaces_existing_files,
    files.missing_folder_gives_an_empty_archive,
)
BY_THE_PROVIDER: Sequence[Check] = (
    files.dangerous_members_are_refused,
    files.files_and_folders_never_replace_each_other,
    files.download_above_the_limit_is_refused,
)


class DriverSandbox:
    """A sandbox whose archives go over its driver's connection. `fallbacks`: those that did not."""

    def __init__(self, sandbox: Sandbox, driver: DriverClient, fallbacks: list[str]) -> None:
        self._sandbox = sandbox
        self.driver = driver
        self.fallbacks = fallbacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        await put_archive(self._provided, self.driver, folder, archive)

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        await get_archive(self._provided, self.driver, folder, archive, limit_bytes)

    @property
    def _provided(self) -> Any:
        return _Provided(self._sandbox, self.fallbacks)


class _Provided:
    """A sandbox that notes the use of the provider's own archives."""

    def __init__(self, sandbox: Sandbox, used: list[str]) -> None:
        self._sandbox = sandbox
        self._used = used

    def __getattr__(self, name: str) -> Any:
        if name in ("put", "get"):
            self._used.append(name)
        return getattr(self._sandbox, name)


@dataclass
class DriverProvider:
    """Opens sandboxes that have a driver, for checks that only move archives."""

    provider: Provider
    fallbacks: list[str] = field(default_factory=list[str])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.provider, name)

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncGenerator[DriverSandbox]:
        async with (
            self.provider.open(replace(spec, command=BOOT_COMMAND)) as sandbox,
            connect(sandbox) as driver,
        ):
            yield DriverSandbox(sandbox, driver, self.fallbacks)


@pytest.fixture
def bench(local: Bench) -> Bench:
    return local


def over_the_connection(bench: Bench) -> tuple[Bench, list[str]]:
    provider: Any = DriverProvider(bench.provider)
    return replace(bench, provider=provider), provider.fallbacks


@pytest.mark.parametrize("check", BY_THE_DRIVER, ids=lambda check: check.__name__)
async def test_driver_moves_small_archives_as_a_provider_does(bench: Bench, check: Check) -> None:
    target, fallbacks = over_the_connection(bench)
    await check(target)
    assert fallbacks == []


@pytest.mark.parametrize("check", BY_THE_PROVIDER, ids=lambda check: check.__name__)
async def test_what_the_driver_does_not_take_is_left_to_the_provider(bench: Bench, check: Check) -> None:
    target, _ = over_the_connection(bench)
    await check(target)


async def test_driver_of_a_container_moves_small_archives_as_its_engine_does(docker: Bench) -> None:
    """Modes and times of files, folders and links are the same, and a folder may be read-only."""
    target, fallbacks = over_the_connection(docker)
    archive = pack(
        (Member(name="closed", kind=Kind.FOLDER, mode=0o555, mtime=1_600_000_000), ()),
        file_entry("closed/file", b"1", mode=0o400),
        (Member(name="closed/link", kind=Kind.SYMLINK, link="file", mtime=1_500_000_000), ()),
        file_entry("new/program", b"2", mode=0o755),
    )
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root / "a", archive)
        assert fallbacks == []
        await docker_put(sandbox, sandbox.root / "b", archive)
        by_driver = await download(sandbox, sandbox.root / "a", target.scratch / "a.tar")
        by_engine = await download(sandbox, sandbox.root / "b", target.scratch / "b.tar")
        assert fallbacks == ["put"]
    assert comparable(by_driver) == comparable(by_engine)


async def docker_put(sandbox: Any, folder: PurePosixPath, archive: bytes) -> None:
    await _Provided(sandbox._sandbox, sandbox.fallbacks).put(folder, archive)


def comparable(listing: dict[str, tuple[Member, bytes]]) -> dict[str, object]:
    """What the archive determines. `new` has the time of its creation, and no link has a mode."""
    return {
        name: (
            member.kind,
            member.mode,
            member.link,
            content,
            0 if name in ("", ".", "new") else member.mtime,
        )
        for name, (member, content) in listing.items()
        if name not in ("", ".")
    }


async def test_no_link_that_is_there_leads_the_driver_out(bench: Bench, tmp_path: Path) -> None:
    """The driver does not follow it; whether the provider does is its own affair, inside the sandbox."""
    outside = tmp_path / "outside"
    outside.mkdir()
    target, fallbacks = over_the_connection(bench)
    provider: Any = target.provider
    async with provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(link_entry("way", str(outside))))
        assert fallbacks == []
        with pytest.raises(DriverError) as refused:
            await sandbox.driver.arrange(
                {
                    "unpack": str(sandbox.root),
                    "tar": base64.b64encode(pack(file_entry("way/file", b"x"))).decode(),
                }
            )
    assert refused.value.data["reason"] == "files"
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("size", [SENT_BYTES - 4096, SENT_BYTES + 1])
async def test_an_archive_over_the_limit_goes_by_the_provider(bench: Bench, size: int) -> None:
    target, fallbacks = over_the_connection(bench)
    archive = pack(file_entry("file", b"x" * size))
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, archive)
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar", 4 << 20)
    assert len(listing["file"][1]) == size
    assert ("put" in fallbacks) == (size > SENT_BYTES)


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
