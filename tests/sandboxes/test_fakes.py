"""Faults of the fake provider, as the driver client sees them."""

from __future__ import annotations

import anyio
import pytest

from decathlon_mcp.driver.client import connect
from decathlon_mcp.driver.messages import Notification
from decathlon_mcp.errors import (
    AtCapacityError,
    DriverError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.plugins.conformance.probe import receive_all
from decathlon_mcp.plugins.conformance.suite import PROBE_COMMAND, ROOT
from decathlon_mcp.sandboxes.base import SandboxSpec
from tests.fakes.calls import call_server
from tests.fakes.driver import FakeCall, FakeTool, Faults, ProcessExit, RunReply, ToolError
from tests.fakes.provider import FakeMachine, FakeProvider
from tests.sandboxes.conftest import driver_spec

pytestmark = pytest.mark.anyio

SPEC = driver_spec("fake-1")
FILES = [{"name": "files", "command": "files"}]


async def echo(call: FakeCall) -> str:
    """Repeats the text."""
    await call.progress(1, 2, "half")
    await call.log("noted")
    return str(call.arguments["text"])


async def refuse(call: FakeCall) -> str:
    raise ToolError("no such file")


async def wait(call: FakeCall) -> str:
    await anyio.sleep_forever()
    return "never"


async def die(call: FakeCall) -> str:
    raise ProcessExit(137, out_of_memory=True)


TOOLS = {
    "files": {
        "echo": FakeTool(echo, {"type": "object", "properties": {"text": {}}}, {"x-unknown": [1]}),
        "refuse": refuse,
        "wait": wait,
        "die": die,
    }
}


async def test_tools_are_listed_and_called_with_progress_and_messages() -> None:
    notifications: list[object] = []

    def record(notification: Notification) -> None:
        notifications.append(notification.decoded())

    with anyio.fail_after(10):
        async with FakeProvider(tools=TOOLS) as provider, provider.open(SPEC) as sandbox:
            async with connect(sandbox) as driver:
                await driver.define(FILES)
                infos = (await driver.start(["files"], deadline_seconds=5))["files"]
                assert infos.tools[0]["description"] == "Repeats the text."
                assert infos.tools[0]["x-unknown"] == [1]
                params = {"name": "echo", "arguments": {"text": "hi"}}
                reply = await call_server(driver, "files", params, on_notification=record)
                assert reply.decoded()["result"]["content"] == [{"type": "text", "text": "hi"}]
    assert [params for params in notifications if isinstance(params, dict)] == [
        {"progressToken": 0, "progress": 1, "total": 2, "message": "half"},
        {"level": "info", "data": "noted"},
    ]


async def test_tool_errors_and_cancellation_leave_the_driver_alive() -> None:
    with anyio.fail_after(10):
        async with FakeProvider(tools=TOOLS) as provider, provider.open(SPEC) as sandbox:
            async with connect(sandbox) as driver:
                await driver.define(FILES)
                await driver.start(["files"], deadline_seconds=5)
                reply = await call_server(driver, "files", {"name": "refuse"})
                assert reply.decoded()["error"]["message"] == "no such file"
                with anyio.move_on_after(0.05):
                    await call_server(driver, "files", {"name": "wait"})
                await driver.ping()


async def test_frozen_driver_refuses_calls_and_still_runs_processes() -> None:
    with anyio.fail_after(10):
        async with FakeProvider(tools=TOOLS, run=lambda request: RunReply(3)) as provider:
            async with provider.open(SPEC) as sandbox, connect(sandbox) as driver:
                await driver.define(FILES)
                await driver.start(["files"], deadline_seconds=5)

                async def expect_frozen() -> None:
                    with pytest.raises(DriverError) as caught:
                        await call_server(driver, "files", {"name": "wait"})
                    assert caught.value.data["reason"] == "frozen"

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(expect_frozen)
                    await driver.ping()
                    await driver.freeze()
                await expect_frozen()
                assert (await driver.run(["anything"], cwd="/", timeout_seconds=5)).exit_code == 3


async def test_sandbox_dies_in_a_call_in_a_process_or_at_a_method() -> None:
    def run(request: object) -> int:
        raise ProcessExit(1)

    with anyio.fail_after(10):
        async with FakeProvider(tools=TOOLS, run=run) as provider:
            async with provider.open(SPEC) as sandbox, connect(sandbox) as driver:
                await driver.define(FILES)
                await driver.start(["files"], deadline_seconds=5)
                with pytest.raises(SandboxLostError, match="out of memory"):
                    await call_server(driver, "files", {"name": "die"})
            async with provider.open(SPEC) as sandbox, connect(sandbox) as driver:
                with pytest.raises(SandboxLostError, match="exit code 1"):
                    await driver.run(["evaluation"], cwd="/", timeout_seconds=5)
        async with FakeProvider(faults=Faults(dies_on="freeze")) as provider:
            async with provider.open(SPEC) as sandbox, connect(sandbox) as driver:
                with pytest.raises(SandboxLostError, match="exit code 137"):
                    await driver.freeze()


async def test_opening_fails_or_is_slow_and_removal_is_refused() -> None:
    faults = Faults(open_error=AtCapacityError("full"))
    with anyio.fail_after(10):
        async with FakeProvider(faults=faults) as provider:
            with pytest.raises(AtCapacityError):
                async with provider.open(SPEC):
                    pass
        async with FakeProvider(faults=Faults(open_seconds=60)) as provider:
            with anyio.move_on_after(0.05):
                async with provider.open(SPEC):
                    pass
            assert provider.machine.sandboxes == {}
        async with FakeProvider(faults=Faults(removals_refused=3)) as provider:
            async with provider.open(SPEC):
                pass
            assert provider.opened[0].failed_removals == 3
            assert provider.machine.sandboxes == {}


async def test_driver_is_never_ready_or_never_answers() -> None:
    with anyio.fail_after(10):
        async with FakeProvider(faults=Faults(never_ready=True)) as provider:
            with anyio.move_on_after(0.1) as waiting:
                async with provider.open(SPEC) as sandbox, connect(sandbox) as driver:
                    await driver.ping()
            assert waiting.cancelled_caught
        async with FakeProvider(faults=Faults(silent_on="start")) as provider:
            async with provider.open(SPEC) as sandbox, connect(sandbox) as driver:
                with anyio.move_on_after(0.1) as waiting:
                    await driver.start([], deadline_seconds=5)
                assert waiting.cancelled_caught
                await driver.ping()


async def test_garbage_is_skipped_and_an_overlong_line_loses_the_sandbox() -> None:
    with anyio.fail_after(30):
        async with FakeProvider(faults=Faults(garbage=True)) as provider:
            async with provider.open(SPEC) as sandbox, connect(sandbox) as driver:
                await driver.ping()
        async with FakeProvider(faults=Faults(overlong_on="freeze")) as provider:
            async with provider.open(SPEC) as sandbox, connect(sandbox) as driver:
                with pytest.raises(SandboxLostError, match="line of more than"):
                    await driver.freeze()


async def test_server_that_does_not_start_reports_its_stderr() -> None:
    faults = Faults(servers_that_fail={"files": "no such module"})
    with anyio.fail_after(10):
        async with FakeProvider(tools=TOOLS, faults=faults) as provider:
            async with provider.open(SPEC) as sandbox, connect(sandbox) as driver:
                await driver.define(FILES)
                with pytest.raises(DriverError) as caught:
                    await driver.start(["files"], deadline_seconds=5)
                assert caught.value.data["about"]["stderr"] == "no such module"


async def test_faults_differ_by_sandbox_and_files_can_be_inspected() -> None:
    with anyio.fail_after(10):
        async with FakeProvider(
            faults=lambda spec: Faults(dies_on="ping" if spec.name == "b" else None)
        ) as provider:
            async with provider.open(driver_spec("a")) as sandbox, connect(sandbox) as driver:
                await driver.arrange(
                    {"write": "/episode/x/y", "text": "z"}, {"copy": "/episode/x", "to": "/w"}
                )
                assert sandbox.tree.text("/w/y") == "z"
                with pytest.raises(DriverError, match="is there"):
                    await driver.arrange({"absent": ["y"], "under": "/episode", "except": []})
                await driver.arrange(
                    {"absent": ["y"], "under": "/episode", "except": ["/episode/x"]},
                    {"remove": "/episode/x"},
                    {"absent": ["y"], "under": "/episode", "except": []},
                )
            async with provider.open(driver_spec("b")) as sandbox, connect(sandbox) as driver:
                with pytest.raises(SandboxLostError):
                    await driver.ping()


async def test_surviving_sandbox_is_taken_back_from_a_provider_that_died() -> None:
    surviving = SandboxSpec("survivor", PROBE_COMMAND, ROOT, survives=True)
    ending = SandboxSpec("other", PROBE_COMMAND, ROOT)
    with anyio.fail_after(10):
        async with FakeMachine() as machine:
            async with FakeProvider("first", machine=machine) as first:
                async with first.open(surviving) as sandbox, first.open(ending) as other:
                    first.die()
                    for stream in (sandbox.stream, other.stream):
                        with pytest.raises(anyio.EndOfStream):
                            await stream.receive()
                    with pytest.raises(ProviderUnavailableError):
                        await sandbox.reopen()
            async with FakeProvider("second", machine=machine) as second:
                await anyio.wait_all_tasks_blocked()
                assert list(machine.sandboxes) == ["survivor"]
                async with second.reattach("first", surviving) as sandbox:
                    await sandbox.stream.send(b'{"write": "/episode/a", "text": "x"}\n')
                    await sandbox.stream.receive()
                    assert sandbox.tree.text("/episode/a") == "x"
                assert machine.sandboxes == {}


async def test_stream_breaks_sandbox_is_lost_and_engine_is_unavailable() -> None:
    spec = SandboxSpec("survivor", PROBE_COMMAND, ROOT, survives=True)
    with anyio.fail_after(10):
        async with FakeProvider() as provider, provider.open(spec) as sandbox:
            await sandbox.stream.send(b"{}\n")
            await anyio.wait_all_tasks_blocked()
            sandbox.break_stream()
            assert await receive_all(sandbox) == b"", "the answer was on its way"
            provider.unavailable = True
            with pytest.raises(ProviderUnavailableError):
                await sandbox.reopen()
            provider.unavailable = False
            await sandbox.reopen()
            await sandbox.stream.send(b"{}\n")
            await sandbox.stream.receive()
            await sandbox.lose(out_of_memory=True)
            assert await receive_all(sandbox) == b""
            assert await sandbox.cause_of_end() == "out of memory"
            with pytest.raises(SandboxLostError):
                await sandbox.reopen()
