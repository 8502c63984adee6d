"""Peers that tests play against: a provider whose sandboxes live in this process, and a zoo of its faults.

    FakeProvider(tools={"files": {"echo": echo}})     # async def echo(call: FakeCall) -> str | Json
    FakeProvider(run=lambda asked: 0 if "preprocess" in asked.argv else 1)
    FakeProvider(faults=Faults(silent_on="call"))
    FakeProvider(faults=lambda spec: Faults(never_ready=spec.name.endswith("-grader")))

It passes the same contract suite as the real ones (`tests/sandboxes`). Its first process is a coroutine that
speaks the driver's side of the wire.
"""

from tests.fakes.driver import FakeCall, FakeRun, FakeTool, RunReply, ToolError
from tests.fakes.faults import Died, Faults
from tests.fakes.provider import FakeMachine, FakeProvider, FakeSandbox
from tests.fakes.tree import Tree

__all__ = [
    "Died",
    "FakeCall",
    "FakeMachine",
    "FakeProvider",
    "FakeRun",
    "FakeSandbox",
    "FakeTool",
    "Faults",
    "RunReply",
    "ToolError",
    "Tree",
]
