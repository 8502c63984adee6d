"""A provider that costs no CPU: the tests' own sandboxes, each of which takes a second to open."""

from __future__ import annotations

from decathlon_mcp.hooks import Plugin
from decathlon_mcp.sandboxes.plugins import NoOptions, ProviderContext, ProviderPlugin
from tests.fakes.driver import FakeCall
from tests.fakes.provider import FakeProvider, Faults

OPEN_SECONDS = 1.0


class WaitingProvider(FakeProvider):
    """See the module."""

    name = "waiting"


async def _echo(call: FakeCall) -> str:
    return str(call.arguments.get("text", ""))


def _create(context: ProviderContext[NoOptions]) -> WaitingProvider:
    tools = {"probe": {"echo": _echo}}
    return WaitingProvider(context.owner, tools=tools, faults=Faults(open_seconds=OPEN_SECONDS))


PROVIDER = ProviderPlugin(_create, survives=False)
PLUGIN = Plugin(name="waiting", providers={"waiting": f"{__name__}:PROVIDER"})
