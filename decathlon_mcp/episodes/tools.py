"""An episode's tools as its clients see them: the task's own, spelled for this server, plus two of ours.

How an episode's calls reach the tools: the task's servers, and those of the suite's own code.

The latter are a server too, started when one of them is first called, and anew should it have died. What the
agent gets of a reply is decided here: as it came, or cut where the suite cuts.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import anyio

from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.driver_client.rpc import NotificationHandler
from decathlon_mcp.errors import DriverError, SetUpError, UnknownToolError
from decathlon_mcp.suites.tool_names import LOCAL, spell
from decathlon_mcp.suites.truncation import cut
from decathlon_mcp.types import JsonObject, Names, as_object

ORIGINAL_KEY = "decathlon/original"
"""`_meta` of a tool whose name was shortened: the server and the name that it has there."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a tool is: the task's server and the name it has there."""

    server: str
    tool: str


def claim_tool(names: Names) -> JsonObject:
    """The tool that ends an attempt."""
    return {
        "name": "local-claim_done" if names == "toolathlon" else "claim_done",
        "title": "Claim done",
        "description": (
            "Claim that the task is done. This ends the attempt: no other tool works any more, the work is "
            "graded as it is. Call it once, when everything is finished. If the task asks for an answer in "
            "words, give it in `answer`."
        ),
        "inputSchema": {
            "type": "object",
            "properties": {
                "answer": {
                    "type": "string",
                    "description": "Your last words on the task: the answer, a summary.",
                }
            },
            "additionalProperties": False,
        },
        "annotations": {"destructiveHint": True, "idempotentHint": True, "openWorldHint": False},
    }


def evaluate_tool() -> JsonObject:
    """The tool that gives the verdict."""
    return {
        "name": "evaluate",
        "title": "Evaluate",
        "description": (
            "Grade the attempt and give the verdict with its reward. If the task was not claimed done, this "
            "ends the attempt first. Grading runs once; later calls give the same verdict. It can take "
            "minutes."
        ),
        "inputSchema": {"type": "object", "properties": {}, "additionalProperties": False},
        "annotations": {"destructiveHint": True, "idempotentHint": True, "openWorldHint": False},
    }


class ToolRouter:
    """The tools of a task's servers under stable names, in stable order.

    Raises SetUpError where two tools would have one name (only `raw` names can clash).
    """

    def __init__(self, offered: Mapping[str, Sequence[JsonObject]], names: Names) -> None:
        claim, evaluate = claim_tool(names), evaluate_tool()
        self.claim_name: str = claim["name"]
        self.evaluate_name: str = evaluate["name"]
        self._routes: dict[str, Route] = {}
        described: dict[str, JsonObject] = {}
        for server in sorted(offered):
            for tool in offered[server]:
                original = tool.get("name")
                if not isinstance(original, str) or not original:
                    continue
                name = spell(names, server, original)
                if name in self._routes or name in (self.claim_name, self.evaluate_name):
                    raise SetUpError(
                        f"two tools are called {name!r} (one of them is {server}'s): "
                        "choose another spelling, e.g. `--names decathlon`"
                    )
                self._routes[name] = Route(server, original)
                described[name] = _described(tool, name, Route(server, original))
        self.tools: list[JsonObject] = [*(described[name] for name in sorted(described)), claim]
        """All but `evaluate`, which is for those who may judge."""
        self.evaluator_tools = [*self.tools, evaluate]

    def route(self, name: str) -> Route:
        """Where a tool is. Raises UnknownToolError naming those that look like it."""
        if (route := self._routes.get(name)) is None:
            near = difflib.get_close_matches(name, [tool["name"] for tool in self.tools], n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UnknownToolError(f"there is no tool {name!r} in this episode{hint}", near=near)
        return route


def _described(tool: JsonObject, name: str, route: Route) -> JsonObject:
    """The tool in its server's words, but for the name; a schema without a type gets one.

    The Python client refuses a whole list for one `inputSchema: {}`.
    """
    schema = as_object(tool.get("inputSchema")) or {}
    told: JsonObject = {
        **tool,
        "name": name,
        "inputSchema": schema if "type" in schema else {"type": "object", **schema},
    }
    if not name.endswith(route.tool):
        original = {"server": route.server, "tool": route.tool}
        told["_meta"] = {**(as_object(tool.get("_meta")) or {}), ORIGINAL_KEY: original}
    return told


class Calls:
    """Relays calls of one episode. `workspace` None: no reply is cut."""

    def __init__(
        self,
        driver: DriverClient,
        *,
        local: JsonObject | None = None,
        deadline_seconds: float = 60.0,
        workspace: PurePosixPath | None = None,
    ) -> None:
        self._driver = driver
        self._local = local
        self._deadline_seconds = deadline_seconds
        self._workspace = workspace
        self._started = False
        self._starting = anyio.Lock()

    async def call(
        self,
        route: Route,
        params: JsonObject,
        *,
        on_progress: NotificationHandler | None = None,
        on_message: NotificationHandler | None = None,
    ) -> JsonObject:
        """The whole reply, `result` or `error`. Raises what the link's `call` and `start` do."""
        own = route.server == LOCAL and self._local is not None
        if own:
            await self._up()
        try:
            reply = await self._driver.call(
                route.server,
                "tools/call",
                params,
                timeout_seconds=None,
                on_progress=on_progress,
                on_message=on_message,
            )
        except DriverError as error:
            if own and error.data.get("reason") == "server":
                self._started = False
            raise
        return reply if own else await self._as_shown(reply)

    async def _up(self) -> None:
        async with self._starting:
            if not self._started and self._local is not None:
                with anyio.CancelScope(shield=True):  # one that is half started could not be started again
                    await self._driver.start([self._local], deadline_seconds=self._deadline_seconds)
                self._started = True

    async def _as_shown(self, reply: JsonObject) -> JsonObject:
        result = as_object(reply.get("result"))
        if self._workspace is None or result is None:
            return reply
        overlong = cut(result, self._workspace)
        if overlong is None:
            return reply
        await self._driver.arrange(
            {"make": str(overlong.path.parent)}, {"write": str(overlong.path), "text": overlong.whole}
        )
        return {**reply, "result": overlong.shown}
