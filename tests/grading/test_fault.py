"""Whose fault a failure is: the rules in their order, over fake sandboxes."""

from __future__ import annotations

import errno
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import PurePosixPath

import anyio
import pytest

from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.errors import (
    DecathlonError,
    DiskFullError,
    DriverError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.grading import fault
from decathlon_mcp.grading.fault import AgentsFaultError, FaultFinder, ProviderHealth
from decathlon_mcp.sandboxes.base import Sandbox, SandboxSpec
from decathlon_mcp.sandboxes.capabilities import Usage
from tests.fakes.driver import Faults
from tests.fakes.provider import FakeProvider

pytestmark = pytest.mark.anyio

UNEXPLAINED = [
    ProviderUnavailableError("the engine was silent"),
    DriverError("broken", reason="files"),
    OSError(errno.EACCES, "Permission denied"),
]
"""Errors that say nothing about whose fault they are."""
BROKEN = Faults(put_error=ProviderUnavailableError("the engine is broken"))


class Place:
    """One sandbox of an agent, and what is known of its provider. `control`: faults of control sandboxes."""

    def __init__(self, control: Faults | None = None, usage: Usage | None = None) -> None:
        self.health = ProviderHealth()
        self._control = control or Faults()
        self._usage = usage or Usage()
        self.provider = FakeProvider(faults=self._faults)
        self.controls = 0

    def _faults(self, spec: SandboxSpec) -> Faults:
        return self._control if spec.name.startswith("control") else Faults(usage=self._usage)

    @asynccontextmanager
    async def open_control(self) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
        self.controls += 1
        spec = SandboxSpec(f"control-{self.controls}", BOOT_COMMAND, PurePosixPath("/episode"), "fake")
        async with self.provider.open(spec) as sandbox, connect(sandbox) as driver:
            yield sandbox, driver

    async def outcome(
        self, error: Exception, *, succeeded: str | None = None, episode: str = "one"
    ) -> Exception | None:
        """What an operation raises that fails with this error. `succeeded`: an episode that does so."""
        finder = FaultFinder(episode, self.health, self.open_control)
        spec = SandboxSpec(f"{episode}-agent", BOOT_COMMAND, PurePosixPath("/episode"), "fake")
        async with self.provider.open(spec) as sandbox:
            try:
                async with finder.deciding(sandbox):
                    if succeeded is not None:
                        self.health.note_success(succeeded)
                    raise error
            except Exception as raised:  # noqa: BLE001
                return raised
        return None


@asynccontextmanager
async def place(control: Faults | None = None, usage: Usage | None = None) -> AsyncGenerator[Place]:
    found = Place(control, usage)
    async with found.provider:
        yield found
    assert found.provider.machine.sandboxes == {}


@pytest.mark.parametrize("budget", ["entries", "memory"])
async def test_an_exceeded_budget_is_the_agents_even_if_everything_fails(budget: str) -> None:
    async with place(BROKEN) as found:
        raised = await found.outcome(LimitExceededError("too much", budget=budget))
        assert isinstance(raised, AgentsFaultError)
        assert f"limit of {budget.replace('_', ' ')}" in raised.message
        assert found.controls == 0


LOST = [
    SandboxLostError("lost", cause="exit code 137"),
    SandboxLostError("lost"),
    ProviderUnavailableError("no", outside="the engine's disk failed"),
    OSError(errno.EIO, "Input/output error"),
]


@pytest.mark.parametrize("error", LOST, ids=repr)
async def test_what_somebody_outside_ended_is_lost_even_if_others_succeed(error: Exception) -> None:
    async with place() as found:
        raised = await found.outcome(error, succeeded="another")
        assert isinstance(raised, SandboxLostError | ProviderUnavailableError)
        assert raised.message.endswith(")")
        assert found.controls == 0


async def test_what_ended_the_first_process_is_looked_up_for_an_error_that_does_not_say_it() -> None:
    async with place() as found:
        spec = SandboxSpec("one-agent", BOOT_COMMAND, PurePosixPath("/episode"), "fake")
        finder = FaultFinder("one", found.health, found.open_control)
        async with found.provider.open(spec) as sandbox:
            await sandbox.lose(out_of_memory=True)
            with pytest.raises(AgentsFaultError, match=r"has ended \(out of memory\) \(what ran inside"):
                async with finder.deciding(sandbox):
                    raise SandboxLostError("the sandbox's first process has ended")


@pytest.mark.parametrize("error", UNEXPLAINED, ids=repr)
async def test_a_failure_of_all_is_lost_unless_the_sandbox_is_over_its_share(error: Exception) -> None:
    async with place(BROKEN) as found:
        raised = await found.outcome(error)
        assert isinstance(raised, DecathlonError)
        assert not isinstance(raised, AgentsFaultError)
        assert "a control sandbox failed too" in raised.message
    for usage in (Usage(memory=1.0), Usage(0.2, pids=0.99), Usage(disk=3.0)):
        async with place(BROKEN, usage) as found:
            raised = await found.outcome(error)
            assert isinstance(raised, AgentsFaultError), usage
            assert "over its share of" in raised.message


FAULTS_OF_A_CONTROL = [
    Faults(open_error=ProviderUnavailableError("no")),
    Faults(get_error=MemoryError()),
    Faults(pause_error=ProviderUnavailableError("no")),
    Faults(dies_on="freeze"),
    Faults(open_seconds=60),
]


@pytest.mark.parametrize("faults", FAULTS_OF_A_CONTROL, ids=repr)
async def test_a_control_sandbox_fails_in_whatever_is_done_with_an_agents(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault, "CONTROL_SECONDS", 0.5)
    async with place(faults) as found:
        raised = await found.outcome(ProviderUnavailableError("the engine was silent"))
        assert isinstance(raised, ProviderUnavailableError)
        assert "a control sandbox failed too" in raised.message


@pytest.mark.parametrize(
    "error",
    [
        DiskFullError("no room"),
        OSError(errno.EMFILE, "Too many open files"),
        KeyError("bug"),
    ],
)
async def test_what_is_tried_again_and_faults_of_the_server_are_not_decided(error: Exception) -> None:
    async with place() as found:
        assert await found.outcome(error, succeeded="another") is error


async def test_a_success_before_the_operation_decides_nothing() -> None:
    async with place(BROKEN) as found:
        found.health.note_success("another")
        await anyio.sleep(0.01)
        raised = await found.outcome(ProviderUnavailableError("the engine was silent"))
        assert isinstance(raised, ProviderUnavailableError)
