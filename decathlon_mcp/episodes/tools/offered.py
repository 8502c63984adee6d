"""An episode's tools: their names for clients, and the routes to the task's servers.

The task's servers come with their own tools; `claim_done` and `evaluate` are ours. An episode has one list
from the time that its tools are known to its end: a prompt in training must not change under the model.

Lists are cached, so that they are known before a task's servers run (`ToolLists`). A list is kept under a key
of everything that normally decides it: the suite's revision, the image, the task and its servers'
configurations with their templates unfilled. No credential is in the key. A list is written only by a set-up
that has started the servers, before any tool can be called, so that no agent can write one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b, sha256
from pathlib import PurePosixPath
from typing import Any
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from decathlon_mcp import __version__
from decathlon_mcp.background import Flag
from decathlon_mcp.driver.mcp_schema import valid_definition
from decathlon_mcp.episodes.extensions import ToolDescriptions
from decathlon_mcp.episodes.state import State
from decathlon_mcp.errors import SetUpError, UnknownToolError
from decathlon_mcp.sandboxes.base import Provider
from decathlon_mcp.storage.kept_tools import CachedLists
from decathlon_mcp.suites.prompts import CLAIM, LOCAL, spell
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, Names, as_json, as_object
from decathlon_mcp.validation import quoted, similar

log = logging.getLogger("decathlon.episodes")

ORIGINAL_KEY = "decathlon/original"
"""Key in the `_meta` of a tool whose name was shortened; its value has the server and the original name."""
HEADER_MARKER = b"x-mcp-header"
"""What is in the schema of a tool some of whose arguments must be repeated in headers."""
ROOT = b"\\u0000root\\u0000"
"""Stands in a cached list for the suite's root in the sandbox, which some providers choose for each sandbox.
As JSON text; no server has NUL in a description."""
MEMO_SECONDS = 2.0
"""How long an answer before the set-up may rely on the revision and the image that an earlier episode of the
task has found. The set-up looks again, at what it uses."""
_ENDS_ATTEMPT = {"destructiveHint": True, "idempotentHint": True, "openWorldHint": False}


@dataclass(frozen=True, slots=True)
class ToolRoute:
    """The server of a tool and the tool's name there. `schema`: of its arguments, as the server sent it."""

    server: str
    tool: str
    schema: JsonObject = field(default_factory=dict[str, Any], compare=False, repr=False)


@cache
def claim_name(names: Names) -> str:
    """Name of the tool that ends an attempt."""
    return spell(names, LOCAL, CLAIM)


def claim_tool(names: Names) -> JsonObject:
    """Definition of the tool that ends an attempt."""
    answer = {
        "type": "string",
        "description": "Your final message: the answer, or a summary of what you did.",
    }
    return {
        "name": claim_name(names),
        "title": "Claim done",
        "description": (
            "Claim that the task is done. This ends the attempt: no other tool works any more, the work is "
            "graded as it is. Call it once, when everything is finished. If the task asks for an answer in "
            "words, give it in `answer`."
        ),
        "inputSchema": {"type": "object", "properties": {"answer": answer}, "additionalProperties": False},
        "annotations": dict(_ENDS_ATTEMPT),
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
        "annotations": dict(_ENDS_ATTEMPT),
    }


class OfferedTools:
    """What an episode offers: the tools by name, as this server spells them, and the route of each.

    Raises SetUpError if two tools get the same name, which only `raw` and `verified` names can.
    """

    def __init__(
        self, servers: Mapping[str, Sequence[JsonObject]], local: ToolDescriptions, names: Names
    ) -> None:
        self.servers = servers
        """The tools that each server has listed, unchanged."""
        self.local = local
        """The tools of the suite's own code, run by one of the servers."""
        claim, evaluate = claim_tool(names), evaluate_tool()
        self.claim_name: str = claim["name"]
        self._routes: dict[str, ToolRoute] = {}
        self._definitions: dict[str, JsonObject] = {}
        self._needs_headers: dict[str, bool] = {}
        """See `schema_with_headers`, of the tools that were asked for."""
        for server in sorted(servers):
            for tool in servers[server]:
                original = tool.get("name")
                if not isinstance(original, str) or not original:
                    continue
                name = spell(names, server, original)
                if name in self._routes or name in (claim["name"], evaluate["name"]):
                    raise SetUpError(
                        f"two tools are called {name!r} (one of them is {server}'s): "
                        "choose another spelling, e.g. `--names decathlon`"
                    )
                schema = as_object(tool.get("inputSchema")) or {}
                self._routes[name] = route = ToolRoute(server, original, schema)
                self._definitions[name] = _renamed(tool, name, route)
        definitions = (self._definitions[name] for name in sorted(self._definitions))
        self.tools: list[JsonObject] = [*definitions, claim]
        """The definitions in a fixed order; without `evaluate`, which only clients that may evaluate see."""
        self.evaluator_tools = [*self.tools, evaluate]

    def route(self, name: str) -> ToolRoute:
        """The route of a tool. Raises UnknownToolError with the names that are similar."""
        if (route := self._routes.get(name)) is None:
            near = similar(name, (tool["name"] for tool in self.tools), count=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UnknownToolError(f"there is no tool {quoted(name)} in this episode{hint}", near=near)
        return route

    def schema_with_headers(self, name: str) -> JsonObject | None:
        """The schema of a tool some of whose arguments must be repeated in headers; None for others."""
        if (definition := self._definitions.get(name)) is None:
            return None
        schema: JsonObject = definition["inputSchema"]
        # Every call without a session asks, and 256 KiB take up to 8 ms.
        if name not in self._needs_headers:
            self._needs_headers[name] = HEADER_MARKER in as_json(schema)
        return schema if self._needs_headers[name] else None

    def to_json(self) -> JsonObject:
        return {
            "servers": dict(self.servers),
            "local": {name: [*tools] for name, tools in self.local.items()},
        }


def _renamed(tool: JsonObject, name: str, route: ToolRoute) -> JsonObject:
    """The server's definition of a tool under another name, as every client accepts it."""
    definition: JsonObject = {**valid_definition(tool), "name": name}
    if not name.endswith(route.tool):
        original = {"server": route.server, "tool": route.tool}
        definition["_meta"] = {**(as_object(definition.get("_meta")) or {}), ORIGINAL_KEY: original}
    return definition


_shared: WeakValueDictionary[bytes, OfferedTools] = WeakValueDictionary()


def offered_tools(text: bytes, names: Names) -> OfferedTools:
    """The tools of the JSON text of `OfferedTools.to_json`; one object for all episodes with the same text.

    Raises SetUpError as `OfferedTools` does, and what a text of another form raises.
    """
    content = blake2b(b"%b %b" % (names.encode(), text)).digest()
    if (tools := _shared.get(content)) is None:
        value = json.loads(text)
        local = {name: tuple(each) for name, each in value["local"].items()}
        tools = _shared[content] = OfferedTools(value["servers"], local, names)
    return tools


def same_tools(one: Sequence[JsonObject], other: Sequence[JsonObject]) -> bool:
    """Whether two lists have the same tools, in whatever order: some servers have none."""
    return sorted(map(as_json, one)) == sorted(map(as_json, other))


class EpisodeTools:
    """The tools that one episode lists, from the time that they are known to its end."""

    def __init__(self, state: State) -> None:
        self.offered: OfferedTools | None = None
        self._state = state
        self._known = Flag()

    async def known(self) -> OfferedTools:
        """Wait until the tools are known, which may be before they can be called; they stay listed after the
        claim.

        Raises the cause of a failed set-up, or EpisodeEndedError.
        """
        await self._known.wait()
        if self.offered is None:
            raise self._state.end_error()
        return self.offered

    def route(self, name: str) -> ToolRoute:
        """The route of a tool. Raises UnknownToolError."""
        assert self.offered is not None, "the tools are not known yet"
        return self.offered.route(name)

    def offer(self, tools: OfferedTools) -> None:
        """List these tools from now on."""
        self.offered = tools
        self._known.set()

    def end(self) -> None:
        """The episode is over: what waits for the tools fails with the reason."""
        self.offered = None
        self._known.set()


@dataclass(frozen=True)
class ToolLists:
    """The cached tool lists of one suite."""

    cache: CachedLists
    suite: Suite
    provider: Provider
    image: str | None
    names: Names
    _expected_keys: dict[str, tuple[float, str | None]] = field(default_factory=dict, repr=False)

    async def known(self, task: Task) -> list[JsonObject] | None:
        """What a task's episodes offer an agent; None if that is not known before the first one.

        Paths are as in the listed prompts; where prompts are provisional, an episode can have other paths.
        """
        key = await self.expected_key(task)
        found = None if key is None else await self.find(key, self.suite.profile.root)
        return None if found is None else [*found.tools]

    async def expected_key(self, task: Task) -> str | None:
        """The key of a task whose sandbox has not been opened; None if its image is not known yet."""
        at, key = self._expected_keys.get(task.id, (0.0, None))
        if key is None or anyio.current_time() - at > MEMO_SECONDS:
            revision = await anyio.to_thread.run_sync(self.suite.revision_of, task)
            key = await self.key(task, revision, None)
            self._expected_keys[task.id] = anyio.current_time(), key
        return key

    async def key(self, task: Task, revision: str, image_digest: str | None) -> str | None:
        """The key of a task's lists. `image_digest`: of its sandbox, if that is open."""
        environment = image_digest or await self.provider.environment(self.image)
        if environment is None:
            return None
        servers, local_code = self.suite.servers, dict(self.suite.profile.local_code)
        configurations = [
            # A server without a file fails the set-up.
            servers[name].model_dump() if name in servers else None
            for name in task.needs.servers
        ]
        decisive = {
            "version": __version__,
            "suite": self.suite.name,
            "revision": revision,
            "environment": environment,
            "task": task.id,
            "servers": configurations,
            "local_tools": {name: local_code.get(name) for name in task.needs.local_tools},
        }
        return sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()

    async def find(self, key: str, root: PurePosixPath) -> OfferedTools | None:
        """The tools under a key, for a sandbox with that root."""
        content = await anyio.to_thread.run_sync(self.cache.read, key)
        if content is None:
            return None
        try:
            return offered_tools(content.replace(ROOT, _escaped(root)), self.names)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("a cached tool list cannot be read", extra=fields(suite=self.suite.name))
            await anyio.to_thread.run_sync(self.cache.delete, key, content)
            return None

    async def keep(self, key: str, tools: OfferedTools, root: PurePosixPath) -> None:
        """Keep the tools that a set-up has found. No tool may have been called in its sandbox."""
        content = as_json(tools.to_json()).replace(_escaped(root), ROOT)
        await anyio.to_thread.run_sync(self.cache.write, key, content)

    async def forget(self, key: str, tools: OfferedTools, root: PurePosixPath) -> None:
        """Delete the entry, if it still has these tools."""
        content = as_json(tools.to_json()).replace(_escaped(root), ROOT)
        await anyio.to_thread.run_sync(self.cache.delete, key, content)


def _escaped(root: PurePosixPath) -> bytes:
    """The path as it is in JSON text."""
    return as_json(str(root))[1:-1]
