"""The zoo: what each fault of the fake provider looks like through a real link."""

from __future__ import annotations

import anyio
import pytest

from decathlon_mcp.driver_client.driver import connect
from decathlon_mcp.errors import AtCapacityError, CallTimeoutError, DriverError, SandboxLostError
from tests.fakes import Died, FakeCall, FakeProvider, FakeTool, Faults, RunReply, ToolError
from tests.sandboxes.conftest import Bench

pytestmark = pytest.mark.anyio

SPEC = Bench("zoo", FakeProvider(), FakeProvider, list).spec
FILES = [{"name": "files", "type": "stdio", "command": "files"}]


async def echo(call: FakeCall) -> str:
    """Say it again."""
    await call.progress(1, 2, "half")
    await call.log("noted")
    return str(call.arguments["text"])


async def refuse(call: FakeCall) -> str:
    raise ToolError("no such file")


async def wait(call: FakeCall) -> str:
    await anyio.sleep_forever()
    return "never"


async def die(call: FakeCall) -> str:
    raise Died(137, out_of_memory=True)


TOOLS = {
    "files": {
        "echo": FakeTool(echo, {"type": "object", "properties": {"text": {}}}, {"x-unknown": [1]}),
        "refuse": refuse,
        "wait": wait,
        "die": die,
    }
}


async def test_tools_are_listed_and_called_with_progress_and_messages() -> None:
    notes: list[object] = []

    async def note(params: dict[str, object]) -> None:
        notes.append(params)

    with anyio.fail_after(10):
        async with FakeProvider(tools=TOOLS) as provider, provider.open(SPEC()) as sandbox:
            async with connect(sandbox) as link:
                facts = (await link.start(FILES, deadline_seconds=5))["files"]
                assert facts.tools[0]["description"] == "Say it again."
                assert facts.tools[0]["x-unknown"] == [1]
                asked = {"name": "echo", "arguments": {"text": "hi"}}
                reply = await link.call(
                    "files", "tools/call", asked, timeout_seconds=5, on_progress=note, on_message=note
                )
                assert reply["result"]["content"] == [{"type": "text", "text": "hi"}]
    assert [note for note in notes if isinstance(note, dict)] == [
        {"progressToken": 0, "progress": 1, "total": 2, "message": "half"},
        {"level": "info", "data": "noted"},
    ]


async def test_a_tools_error_is_a_reply_and_a_slow_tool_times_out_or_is_cancelled() -> None:
    with anyio.fail_after(10):
        async with FakeProvider(tools=TOOLS) as provider, provider.open(SPEC()) as sandbox:
            async with connect(sandbox) as link:
                await link.start(FILES, deadline_seconds=5)
                reply = await link.call("files", "tools/call", {"name": "refuse"}, timeout_seconds=5)
                assert reply["error"]["message"] == "no such file"
                with pytest.raises(CallTimeoutError):
                    await link.call("files", "tools/call", {"name": "wait"}, timeout_seconds=0.05)
                with anyio.move_on_after(0.05):
                    await link.call("files", "tools/call", {"name": "wait"}, timeout_seconds=5)
                await link.ping()


async def test_a_frozen_sandbox_calls_no_tool_and_still_runs_processes() -> None:
    with anyio.fail_after(10):
        async with FakeProvider(tools=TOOLS, run=lambda asked: RunReply(3)) as provider:
            async with provider.open(SPEC()) as sandbox, connect(sandbox) as link:
                await link.start(FILES, deadline_seconds=5)

                async def frozen() -> None:
                    with pytest.raises(DriverError) as caught:
                        await link.call("files", "tools/call", {"name": "wait"}, timeout_seconds=5)
                    assert caught.value.data["reason"] == "frozen"

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(frozen)
                    await link.ping()
                    await link.freeze()
                await frozen()
                assert (await link.run(["anything"], cwd="/", timeout_seconds=5)).exit_code == 3


async def test_it_dies_in_a_call_in_a_process_or_when_asked() -> None:
    def run(asked: object) -> int:
        raise Died(1)

    with anyio.fail_after(10):
        async with FakeProvider(tools=TOOLS, run=run) as provider:
            async with provider.open(SPEC()) as sandbox, connect(sandbox) as link:
                await link.start(FILES, deadline_seconds=5)
                with pytest.raises(SandboxLostError, match="out of memory"):
                    await link.call("files", "tools/call", {"name": "die"}, timeout_seconds=5)
                assert sandbox.out_of_memory
            async with provider.open(SPEC()) as sandbox, connect(sandbox) as link:
                with pytest.raises(SandboxLostError, match="exit code 1"):
                    await link.run(["evaluation"], cwd="/", timeout_seconds=5)
        async with FakeProvider(faults=Faults(dies_on="freeze")) as provider:
            async with provider.open(SPEC()) as sandbox, connect(sandbox) as link:
                with pytest.raises(SandboxLostError, match="exit code 137"):
                    await link.freeze()


async def test_it_is_slow_or_refuses_to_open_or_to_go() -> None:
    faults = Faults(open_error=AtCapacityError("full"))
    with anyio.fail_after(10):
        async with FakeProvider(faults=faults) as provider:
            with pytest.raises(AtCapacityError):
                async with provider.open(SPEC()):
                    pass
        async with FakeProvider(faults=Faults(open_seconds=60)) as provider:
            with anyio.move_on_after(0.05):
                async with provider.open(SPEC()):
                    pass
            assert provider.machine.sandboxes == {}
        async with FakeProvider(faults=Faults(removals_refused=3)) as provider:
            async with provider.open(SPEC()):
                pass
            assert provider.opened[0].removals == 3
            assert provider.machine.sandboxes == {}


async def test_it_is_never_ready_or_never_answers() -> None:
    with anyio.fail_after(10):
        async with FakeProvider(faults=Faults(never_ready=True)) as provider:
            with anyio.move_on_after(0.1) as waiting:
                async with provider.open(SPEC()) as sandbox, connect(sandbox) as link:
                    await link.ping()
            assert waiting.cancelled_caught
        async with FakeProvider(faults=Faults(silent_on="start")) as provider:
            async with provider.open(SPEC()) as sandbox, connect(sandbox) as link:
                with anyio.move_on_after(0.1) as waiting:
                    await link.start([], deadline_seconds=5)
                assert waiting.cancelled_caught
                await link.ping()


async def test_noise_is_passed_over_and_an_overlong_line_loses_the_sandbox() -> None:
    with anyio.fail_after(30):
        async with FakeProvider(faults=Faults(garbage=True)) as provider:
            async with provider.open(SPEC()) as sandbox, connect(sandbox) as link:
                await link.ping()
        async with FakeProvider(faults=Faults(overlong_on="freeze")) as provider:
            async with provider.open(SPEC()) as sandbox, connect(sandbox) as link:
                with pytest.raises(SandboxLostError, match="line of more than"):
                    await link.freeze()


async def test_a_server_that_does_not_come_up_says_its_last_words() -> None:
    faults = Faults(servers_that_fail={"files": "no such module"})
    with anyio.fail_after(10):
        async with FakeProvider(tools=TOOLS, faults=faults) as provider:
            async with provider.open(SPEC()) as sandbox, connect(sandbox) as link:
                with pytest.raises(DriverError) as caught:
                    await link.start(FILES, deadline_seconds=5)
                assert caught.value.data["about"]["stderr"] == "no such module"


async def test_faults_may_differ_by_sandbox_and_files_are_at_hand() -> None:
    with anyio.fail_after(10):
        async with FakeProvider(
            faults=lambda spec: Faults(dies_on="ping" if spec.name == "b" else None)
        ) as it:
            async with it.open(SPEC(name="a")) as sandbox, connect(sandbox) as link:
                await link.arrange({"write": "/episode/x/y", "text": "z"}, {"copy": "/episode/x", "to": "/w"})
                assert sandbox.tree.text("/w/y") == "z"
                with pytest.raises(DriverError, match="is there"):
                    await link.arrange({"absent": ["y"], "under": "/episode", "except": []})
                await link.arrange(
                    {"absent": ["y"], "under": "/episode", "except": ["/episode/x"]},
                    {"remove": "/episode/x"},
                    {"absent": ["y"], "under": "/episode", "except": []},
                )
            async with it.open(SPEC(name="b")) as sandbox, connect(sandbox) as link:
                with pytest.raises(SandboxLostError):
                    await link.ping()
