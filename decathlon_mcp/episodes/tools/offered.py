"""An episode's tools: their names for clients, and the routes to the task's servers.

The task's servers come with their own tools; `claim_done` and `evaluate` are ours. A list that was given to a
client stays the episode's; what a server changes later is for sessions (see `offer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol, Self
from weakref import WeakSet, WeakValueDictionary

from decathlon_mcp.background import Flag
from decathlon_mcp.driver.mcp_repair import valid_definition
from decathlon_mcp.episodes.state import Phase, State
from decathlon_mcp.errors import (
    SetUpError,
    UnknownToolError,
)
from decathlon_mcp.foreign_names import quoted, similar
from decathlon_mcp.suites.local_tools import (
    ToolDescriptions,
)
from decathlon_mcp.suites.tool_names import CLAIM, LOCAL, spell
from decathlon_mcp.types import JsonObject, Names, as_json, as_object

ORIGINAL_KEY = "decathlon/original"
"""Key in the `_meta` of a tool whose name was shortened; its value has the server and the original name."""


@dataclass(frozen=True, slots=True)
class ToolRoute:
    """The server of a tool and the tool's name there. `schema`: of its arguments, as the server sent it."""

    server: str
    tool: str
    schema: JsonObject = field(default_factory=dict[str, Any], compare=False, repr=False)


def claim_name(names: Names) -> str:
    """Name of the tool that ends an attempt."""
    return spell(names, LOCAL, CLAIM)


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
    which only `raw` and `verified` names can.
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
                self._routes[name] = route = ToolRoute(
                    server, original, as_object(tool.get("inputSchema")) or {}
                )
                definitions[name] = _renamed(tool, name, route)
        self.tools: list[JsonObject] = [*(definitions[name] for name in sorted(definitions)), claim]
        """All tools except `evaluate`, which only clients that may evaluate see."""
        self.evaluator_tools = [*self.tools, evaluate]

    def has(self, name: str) -> bool:
        """Whether a tool of the task has this name."""
        return name in self._routes

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


class _Routers:
    """Routers by content, as long as an episode has them: a batch has hundreds of episodes of one task."""

    def __init__(self) -> None:
        self._routers: WeakValueDictionary[bytes, ToolRouter] = WeakValueDictionary()

    def get(self, offered: Mapping[str, Sequence[JsonObject]], names: Names) -> ToolRouter:
        content = blake2b(as_json([names, offered])).digest()
        router = self._routers.get(content)
        if router is None:
            router = self._routers[content] = ToolRouter(offered, names)
        return router


shared_router = _Routers().get
"""The router of these tools, which episodes with the same tools share. Raises SetUpError as `ToolRouter`."""


def same_tools(one: Sequence[JsonObject], other: Sequence[JsonObject]) -> bool:
    """Whether two lists have the same tools, in whatever order: some servers have none."""
    return sorted(map(as_json, one)) == sorted(map(as_json, other))


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a ready episode. `servers`: by server; `local`: those of the suite's own code.

    `changed`: the tools of servers that have changed theirs since then.
    """

    servers: Mapping[str, list[JsonObject]]
    local: ToolDescriptions
    changed: Mapping[str, list[JsonObject]] = field(default_factory=dict[str, list[JsonObject]])

    def to_json(self) -> JsonObject:
        value: JsonObject = {
            "servers": dict(self.servers),
            "local": {name: [*tools] for name, tools in self.local.items()},
        }
        return {**value, "changed": dict(self.changed)} if self.changed else value

    @classmethod
    def from_json(cls, value: JsonObject) -> Self:
        local = {name: tuple(tools) for name, tools in value["local"].items()}
        return cls(value["servers"], local, value.get("changed", {}))

    @property
    def current(self) -> Mapping[str, list[JsonObject]]:
        """The tools by server, as they are now."""
        return {**self.servers, **self.changed}


class ToolListener(Protocol):
    """A client that is notified when the tools of an episode have changed."""

    async def tools_changed(self, tools: EpisodeTools) -> None:
        """Notify the client. May take long, and must not raise."""
        ...


class EpisodeTools:
    """The tools that one episode lists, from the time that they are known to its end.

    `names`: how they are spelled. `save` writes them into the episode's row.
    """

    def __init__(self, state: State, names: Names, save: Callable[[OfferedTools], None]) -> None:
        self.offered: OfferedTools | None = None
        self.router: ToolRouter | None = None
        """The tools' names as they were listed first."""
        self.listeners: WeakSet[ToolListener] = WeakSet()
        self._state = state
        self._names: Names = names
        self._save = save
        self._changed_router: ToolRouter | None = None
        self._known = Flag()

    @property
    def current_router(self) -> ToolRouter | None:
        """As `router`, with the tools that servers have now."""
        return self._changed_router or self.router

    async def known(self) -> ToolRouter:
        """Wait until the tools are known, which may be before they can be called; they stay listed after the
        claim.

        Raises the cause of a failed set-up, or EpisodeEndedError.
        """
        await self._known.wait()
        if self.router is None:
            raise self._state.end_error()
        return self.router

    def route(self, name: str) -> ToolRoute:
        """The route of a tool that is listed now, or was listed first. Raises UnknownToolError."""
        assert self.router is not None, "the tools are not known yet"
        if self._changed_router is not None and self._changed_router.has(name):
            return self._changed_router.route(name)
        return self.router.route(name)

    def offer(self, tools: OfferedTools, router: ToolRouter) -> None:
        """List these tools from now on, if none are listed yet: a list that was given never changes."""
        if self.offered is None:
            self._save(tools)
            self.offered, self.router = tools, router
            self._known.set()

    def change(self, server: str, tools: list[JsonObject]) -> bool:
        """A server has other tools from now on; False if they are the same as before.

        Raises SetUpError if two tools would have the same name.
        """
        if self.offered is None or self._state.phase is not Phase.READY:
            return False
        if same_tools(self.offered.current.get(server, []), tools):
            return False
        changed = replace(self.offered, changed={**self.offered.changed, server: tools})
        router = shared_router(changed.current, self._names)
        self._save(changed)
        self.offered, self._changed_router = changed, router
        return True

    def restore(self, tools: OfferedTools) -> None:
        """List what an earlier server has listed."""
        self.offered, self.router = tools, shared_router(tools.servers, self._names)
        if tools.changed:
            self._changed_router = shared_router(tools.current, self._names)
        self._known.set()

    def end(self) -> None:
        """The episode is over: what waits for the tools fails with the reason."""
        self.offered = self.router = self._changed_router = None
        self._known.set()
