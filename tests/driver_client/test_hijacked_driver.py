"""A driver that was taken over ends nothing but its own episode: whatever it writes, others go on."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path, PurePosixPath

import anyio
import decathlon_sandbox
import pytest
from decathlon_sandbox import wire

from decathlon_mcp.driver import stream as stream_module
from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.driver.transfers import get_archive, put_archive
from decathlon_mcp.errors import BadRequestError, DriverError, SandboxLostError
from decathlon_mcp.sandboxes.base import Sandbox, SandboxSpec
from decathlon_mcp.sandboxes.host.provider import HostProvider
from tests.driver_client import hijacked

pytestmark = pytest.mark.anyio

SOURCES = str(Path(decathlon_sandbox.__file__).parents[1])
BOUND_SECONDS = 60.0


@asynccontextmanager
async def attacked(
    folder: Path, attack: Callable[[], None]
) -> AsyncGenerator[tuple[Sandbox, DriverClient, DriverClient]]:
    """A sandbox whose driver attacks the server, its driver, and the honest driver of another episode."""
    program = ("env", f"PYTHONPATH={SOURCES}", sys.executable, hijacked.__file__, attack.__name__)
    specs = [
        SandboxSpec(name, command, PurePosixPath("/e"))
        for name, command in (("hijacked", program), ("honest", BOOT_COMMAND))
    ]
    owner, reconnect = f"tests-hijacked-{uuid.uuid4().hex}", ReconnectPolicy()
    async with (
        HostProvider(owner, folder, isolation="none") as provider,
        provider.open(specs[0]) as sandbox,
        provider.open(specs[1]) as other_sandbox,
        connect(sandbox, reconnect=reconnect) as driver,
        connect(other_sandbox, reconnect=reconnect) as other,
    ):
        with anyio.fail_after(BOUND_SECONDS):
            yield sandbox, driver, other


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (hijacked.never_ends_a_line, "a line of more than"),
        (hijacked.reads_nothing, "does not read"),
        (hijacked.has_never_received_anything, "it has not received more requests than there are"),
        (hijacked.refuses_the_server, "another server process has taken it over"),
    ],
)
async def test_driver_that_violates_the_protocol_loses_its_own_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[[], None], reason: str
) -> None:
    monkeypatch.setattr(stream_module, "MAX_UNSENT_BYTES", 1 << 19)
    async with attacked(tmp_path, attack) as (_, driver, other):
        with suppress(SandboxLostError):
            await driver.ping()
        await driver.closed.wait()
        error = await driver.closed_error()
        assert reason in error.message
        assert error.data.get("running"), "it is the episode's fault, and no loss of the infrastructure"
        await other.ping()


@pytest.mark.parametrize(
    "attack",
    [
        hijacked.answers_what_was_not_asked,
        hijacked.demands_attachments,
        hijacked.replies_are_deep_or_wide,
        hijacked.floods_with_notifications,
    ],
)
async def test_lies_of_a_driver_cost_its_own_requests_at_most(
    tmp_path: Path, attack: Callable[[], None]
) -> None:
    async with attacked(tmp_path, attack) as (_, driver, other):
        for _ in range(6):
            if attack is hijacked.replies_are_deep_or_wide:
                with pytest.raises(DriverError, match=r"invalid reply|cannot be read"):
                    await driver.request(wire.PING, {})
            else:
                assert await driver.request(wire.PING, {}) == {}
            await other.ping()
        assert await driver.request(wire.MERGE, {}) == {}


async def test_archive_of_a_driver_that_leads_out_of_its_folder_is_unpacked_nowhere(tmp_path: Path) -> None:
    archive, folder = tmp_path / "archive.tar", PurePosixPath("/e")
    packs = hijacked.packs_files_for_other_folders
    async with attacked(tmp_path / "sandboxes", packs) as (sandbox, driver, other):
        await get_archive(sandbox, driver, folder, archive, 1 << 20)
        with pytest.raises(BadRequestError, match="outside its folder"):
            await put_archive(sandbox, other, folder, archive)
