"""An episode's tools: their names for clients, the routes to the task's servers, and the calls.

The task's servers come with their own tools; `claim_done` and `evaluate` are ours. The suite's local tools
run in one more server, named `local`, which starts with the first call of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import anyio

from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.driver_client.link import Request
from decathlon_mcp.driver_client.mcp_schema import valid_definition
from decathlon_mcp.driver_client.messages import Notification
from decathlon_mcp.driver_client.replies import CallParams, Cut, Reply
from decathlon_mcp.episodes.server_starts import ServerStarts
from decathlon_mcp.errors import DecathlonError, DriverError, SetUpError, SuiteError, UnknownToolError
from decathlon_mcp.foreign_names import quoted, similar
from decathlon_mcp.suites.local_tools import (
    ToolDescriptions,
    describe_command,
    known_needs,
    parse_descriptions,
)
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.suites.tool_names import spell
from decathlon_mcp.types import JsonObject, Names, as_object

OUTPUT_TAIL = 2000
"""Characters of a failed command's stderr that an error message quotes."""
ORIGINAL_KEY = "decathlon/original"
"""Key in the `_meta` of a tool whose name was shortened; its value has the server and the original name."""


@dataclass(frozen=True, slots=True)
class ToolRoute:
    """The server of a tool and the tool's name there."""

    server: str
    tool: str


def claim_name(names: Names) -> str:
    """Name of the tool that ends an attempt."""
    return "local-claim_done" if names == "toolathlon" else "claim_done"


def claim_tool(names: Names) -> JsonObject:
    """Definition of the tool that ends an attempt."""
    return {
        "name": claim_name(names),
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
                    "description": "Your final message: the answer, or a summary of what you did.",
                }
            },
            "additionalProperties": False,
        },
        "annotations": {"destructiveHint": True, "idempotentHint": True, "openWorldHint": False},
    }


def evaluate_tool() -> JsonObject:
    """Definition of the tool that returns the verdict."""
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
    """Maps tool names, as this server spells them, to the task's servers. Names and order are stable.

    `offered`: the tools that each server listed, unchanged. Raises SetUpError if two tools get the same name,
    which only `raw` names can.
    """

    def __init__(self, offered: Mapping[str, Sequence[JsonObject]], names: Names) -> None:
        self.offered = offered
        claim, evaluate = claim_tool(names), evaluate_tool()
        self.claim_name = claim_name(names)
        self.evaluate_name: str = evaluate["name"]
        self._routes: dict[str, ToolRoute] = {}
        definitions: dict[str, JsonObject] = {}
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
                self._routes[name] = route = ToolRoute(server, original)
                definitions[name] = _renamed(tool, name, route)
        self.tools: list[JsonObject] = [*(definitions[name] for name in sorted(definitions)), claim]
        """All tools except `evaluate`, which only clients that may evaluate see."""
        self.evaluator_tools = [*self.tools, evaluate]

    def route(self, name: str) -> ToolRoute:
        """The route of a tool. Raises UnknownToolError with the names that are similar."""
        if (route := self._routes.get(name)) is None:
            near = similar(name, (tool["name"] for tool in self.tools), count=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UnknownToolError(f"there is no tool {quoted(name)} in this episode{hint}", near=near)
        return route


def _renamed(tool: JsonObject, name: str, route: ToolRoute) -> JsonObject:
    """The server's definition of a tool under another name, as every client accepts it."""
    definition: JsonObject = {**valid_definition(tool), "name": name}
    if not name.endswith(route.tool):
        original = {"server": route.server, "tool": route.tool}
        definition["_meta"] = {**(as_object(definition.get("_meta")) or {}), ORIGINAL_KEY: original}
    return definition


class ToolSession:
    """The tools of one ready episode and the driver that calls them.

    `starts` starts the servers that do not run yet. `cut`: how overlong replies of the task's servers are
    shortened; None passes every reply on whole.
    """

    def __init__(
        self,
        driver: DriverClient,
        router: ToolRouter,
        starts: ServerStarts,
        *,
        cut: Cut | None = None,
    ) -> None:
        self.router = router
        self.starts = starts
        self.driver = driver
        self._cut = cut

    def request(
        self,
        route: ToolRoute,
        params: CallParams,
        request_id: int,
        *,
        on_outcome: Callable[[Reply | DecathlonError | None], object],
        on_notification: Callable[[Notification], object],
    ) -> Request:
        """The driver's request for a call, see `DriverClient.tool_call`."""
        return self.driver.tool_call(
            request_id,
            route.server,
            params.for_tool(route.tool),
            cut=self._cut_of(route.server),
            on_outcome=on_outcome,
            on_notification=on_notification,
        )

    def _cut_of(self, server: str) -> Cut | None:
        return None if server in self.starts.optional else self._cut


@dataclass(slots=True)
class LocalTools:
    """Definitions of one suite's local tools; each is read from the suite's code once and kept in `known`."""

    known: dict[str, tuple[JsonObject, ...]] = field(default_factory=dict[str, tuple[JsonObject, ...]])
    _lock: anyio.Lock = field(default_factory=anyio.Lock)

    async def describe(
        self, suite: Suite, task: Task, driver: DriverClient, *, root: PurePosixPath, timeout_seconds: float
    ) -> ToolDescriptions:
        """The definitions of a task's local tools. Raises SetUpError if the suite's code fails."""
        needs = known_needs(suite.profile, task.needs.local_tools)
        async with self._lock:
            unknown = [need for need in needs if need not in self.known]
            if unknown:
                self.known.update(await _run_describe(suite.profile, unknown, driver, root, timeout_seconds))
        return {need: self.known[need] for need in needs}


async def _run_describe(
    profile: SuiteProfile,
    needs: Sequence[str],
    driver: DriverClient,
    root: PurePosixPath,
    timeout_seconds: float,
) -> ToolDescriptions:
    try:
        result = await driver.run(
            describe_command(profile, needs, root),
            cwd=str(root),
            env=dict(profile.environment),
            timeout_seconds=timeout_seconds,
            channel=True,
        )
        if result.exit_code == 0:
            return parse_descriptions(result.channel or "", needs)
        cause = result.stderr.strip()[-OUTPUT_TAIL:] or "it took too long"
    except (DriverError, SuiteError) as error:
        cause = error.message
    raise SetUpError(f"the local tools {', '.join(needs)} could not be described: {cause}")
