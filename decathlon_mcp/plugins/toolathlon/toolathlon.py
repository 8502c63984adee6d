"""Toolathlon's hooks on the episodes of a suite, whose profile says which parts it uses; and its releases.

Toolathlon-Verified is upstream's repaired release of the same 108 tasks (2026-06-30,
https://toolathlon.xyz/docs/blog/toolathlon-verified). It changed 83 of them, so that rewards of one release
say little about the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, cast

import anyio
import anyio.to_thread
from pydantic_core import to_json

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.extensions import CallFilter, SuiteHooks, ToolDescriptions
from decathlon_mcp.errors import DriverError, SetUpError, SuiteError
from decathlon_mcp.grading.attempt import Attempt, Facts
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.json_limits import MAX_NODES, check_json
from decathlon_mcp.payloads import source
from decathlon_mcp.plugins.toolathlon.traj_log import TrajectoryLog, eval_res
from decathlon_mcp.storage.kept_files import indented
from decathlon_mcp.suites.checkout import git_output
from decathlon_mcp.suites.documents import read_bytes
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.prompts import LOCAL
from decathlon_mcp.suites.suite import Release, Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject, as_object

OUTPUT_TAIL = 2000
"""Characters of a failed command's stderr that an error message quotes."""


def _command(
    profile: SuiteProfile, needs: Collection[str], root: PurePosixPath, extra: Mapping[str, Any]
) -> list[str]:
    """The command that describes these tools on a channel or, with their `tools`, serves them."""
    code, workspace = dict(profile.local_code), str(root / profile.workspace)
    order = {"workspace": workspace, "code": {need: code[need] for need in needs}, **extra}
    return [*profile.python, "-c", source("local_tools_server", __package__), json.dumps(order)]


def _are_tools(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(tool.get("name"), str) and as_object(tool.get("inputSchema")) is not None
        for tool in (as_object(item) or {} for item in cast("list[Any]", value))
    )


class ToolathlonHooks(SuiteHooks):
    """Toolathlon's part of the episodes of one suite."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._profile = suite.profile
        # Definitions of local tools; each is read from the suite's code once.
        self._known: ToolDescriptions = {}
        self._lock = anyio.Lock()

    def facts(self) -> JsonObject:
        """Verdicts say whether arguments were coerced."""
        return {"coerced_arguments": self._profile.coerces_arguments}

    def call_filter(self, facts: Facts) -> CallFilter | None:
        """Arguments are coerced in an episode whose facts say so."""
        return coerced_arguments if facts.coerced_arguments else None

    async def describe_local_tools(
        self, task: Task, driver: DriverClient, *, root: PurePosixPath, timeout_seconds: float
    ) -> ToolDescriptions:
        """The definitions of a task's local tools. Raises SetUpError if the suite's code fails."""
        needs = [need for need in task.needs.local_tools if need in dict(self._profile.local_code)]
        async with self._lock:
            if unknown := [need for need in needs if need not in self._known]:
                found = await self._describe(unknown, driver, root, timeout_seconds)
                self._known = {**self._known, **found}
        return {need: self._known[need] for need in needs}

    async def _describe(
        self, needs: Collection[str], driver: DriverClient, root: PurePosixPath, timeout_seconds: float
    ) -> ToolDescriptions:
        try:
            result = await driver.run(
                _command(self._profile, needs, root, {}),
                cwd=str(root),
                env=dict(self._profile.environment),
                timeout_seconds=timeout_seconds,
                channel=True,
            )
        except DriverError as error:
            cause = error.message
        else:
            cause = result.stderr.strip()[-OUTPUT_TAIL:] or "it took too long"
            if result.exit_code == 0:
                try:
                    described = as_object(json.loads(result.channel or "")) or {}
                except ValueError:
                    described = {}
                faulty = [need for need in needs if not _are_tools(described.get(need))]
                if not faulty:
                    return {need: tuple(described[need]) for need in needs}
                cause = f"the suite's code gave no tools for {faulty[0]}"
        raise SetUpError(f"the local tools {', '.join(needs)} could not be described: {cause}")

    def local_server(self, descriptions: ToolDescriptions, root: PurePosixPath) -> JsonObject:
        """The SERVER object, for the driver's `start`, of the server that runs the suite's own code."""
        # No `request_seconds`: the tools have time limits of their own.
        program, *arguments = _command(self._profile, descriptions, root, {"tools": descriptions})
        return {
            "name": LOCAL,
            "command": program,
            "args": arguments,
            "env": dict(self._profile.environment),
            "inherit": "all",
            "cwd": str(root),
        }

    def evaluator_log(self, attempt: Attempt, task: Task, root: PurePosixPath) -> Iterable[bytes]:
        """`traj_log.json`, as evaluators get it."""
        return TrajectoryLog(attempt, suite=self._suite, task=task, root=root)

    def files(self, attempt: Attempt, task: Task, verdict: Verdict) -> Mapping[str, Iterable[bytes]]:
        """The files of a graded episode that Toolathlon's viewer (vis_traj) shows."""
        return {
            "traj_log.json": self.evaluator_log(attempt, task, self._profile.root),
            "eval_res.json": (indented(eval_res(attempt, self._profile, verdict)),),
        }


BEFORE = Release("before", "before Toolathlon-Verified")
VERIFIED = Release("verified", "Toolathlon-Verified or later")
UNKNOWN = Release("unknown", "unknown whether before or after Toolathlon-Verified")
VERIFIED_COMMIT = "d57361c0f1582cf9a0675c0753315bb6b004bd0e"
ROOT_COMMIT = "be334ecace50427432d4f53a097c837256ab1e28"
"""The first commit of upstream's history: a history that contains it has not been shortened."""
VERIFIED_TEXTS = "2afe3883779e05b30b900d0c355d05e0abd3f856ce7608434d8f410112e2c41c"
TEXTS_BEFORE = frozenset(
    {
        "798c477d7fb05740833c15a6ef3ffc8d37a0a46df6cb91b2ec236131e169151c",  # 500e3d86, 2025-10-28
        "8c69dc6d6f3314c96a0cc8be759f5643aef1d983665aa9fb18c86ebe13517472",  # fae857db, 2025-11-04
    }
)
TASKS = "tasks/finalpool"


def find_release(checkout: Path) -> Release:
    """The release of a checkout of Toolathlon: by its history, else by the texts of its tasks.

    Blocks: runs git. A fork with tasks of its own, whose history does not go back to upstream's, is
    UNKNOWN.
    """
    history = _history(checkout)
    if VERIFIED_COMMIT in history:
        return VERIFIED
    texts = texts_digest(checkout)
    # Before the history: a fork may have upstream's changes without its commits.
    if texts == VERIFIED_TEXTS:
        return VERIFIED
    return BEFORE if ROOT_COMMIT in history or texts in TEXTS_BEFORE else UNKNOWN


def texts_digest(checkout: Path) -> str:
    """A digest of the task texts in English, by task."""
    total = hashlib.sha256()
    for file in sorted((checkout / TASKS).glob("*/docs/task.md")):
        total.update(f"{file.parent.parent.name}\0".encode())
        try:
            total.update(hashlib.sha256(read_bytes(file)).digest())
        except SuiteError:
            continue  # reported where the task is read
    return total.hexdigest()


def _history(checkout: Path) -> frozenset[str]:
    """The commits that the checkout's commit is made of; empty without git."""
    if not (checkout / ".git").exists():
        return frozenset()
    return frozenset((git_output(checkout, "rev-list", "HEAD") or "").split())


MAX_STEPS = 200_000
"""Schemas of unions that are looked at for one call: some 50 ms. Without unions a call needs none."""
QUICK_STEPS = 2_000
QUICK_BYTES = 16_384
"""A call that needs more steps, or has longer arguments, is coerced in a thread."""

_ANY: JsonObject = {}
"""The schema that allows every value."""
_COERCIBLE = frozenset({"object", "array", "integer", "number", "boolean"})
_CLASSES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "string": str,
    "null": type(None),
}
"""By their names in schemas. A schema can name any number of others, which mean nothing."""


class _StepsError(Exception):
    """The unions of a schema need more steps."""


async def coerced_arguments(arguments: bytes, schema: JsonObject) -> bytes:
    """The JSON text of a tool's arguments with strings replaced as its input schema asks for.

    The same text if nothing is replaced, or if a limit is reached.
    """
    if len(arguments) <= QUICK_BYTES:
        with suppress(_StepsError):
            return _coerced(arguments, schema, QUICK_STEPS)
    try:
        return await anyio.to_thread.run_sync(_coerced, arguments, schema, MAX_STEPS)
    except _StepsError:
        return arguments


def _coerced(arguments: bytes, schema: JsonObject, max_steps: int) -> bytes:
    coercion = _Coercion(max_steps)
    try:
        before = json.loads(arguments)
        after = coercion.coerced(before, schema)
        if coercion.replaced == 0:
            return arguments
        text = _encoded(after)
        check_json(text)
    except (ValueError, RecursionError):
        return arguments
    return text


class _Coercion:
    """One call's arguments. `replaced`: how many strings were."""

    def __init__(self, max_steps: int) -> None:
        self.replaced = 0
        self._nodes = MAX_NODES
        self._steps = max_steps
        # By identity: one schema of an array's items is asked for each of them.
        self._types: dict[int, frozenset[str]] = {}

    def coerced(self, value: Any, schema: JsonObject) -> Any:
        declared = self._declared_types(schema)
        wanted = declared & _COERCIBLE
        if isinstance(value, str) and wanted and "string" not in declared:
            value = self._decoded(value, wanted)
        active = self._matching(value, schema)
        if isinstance(value, dict):
            properties = as_object(active.get("properties")) or _ANY
            others = _first_object(active.get("additionalProperties"))
            items = cast("JsonObject", value).items()
            return {
                key: self.coerced(item, _first_object(properties.get(key), others)) for key, item in items
            }
        if isinstance(value, list) and (item_schema := as_object(active.get("items"))) is not None:
            return [self.coerced(item, item_schema) for item in cast("list[Any]", value)]
        return cast("Any", value)

    def _decoded(self, text: str, wanted: frozenset[str]) -> Any:
        """The value of a JSON text if it has one of these types, else the text."""
        try:
            # A stand-in for what cannot be encoded, which only unpaired surrogates cannot.
            nodes = check_json(text.encode("utf-8", "replace"), max_nodes=self._nodes)
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if not any(_has_type(value, name) for name in wanted):
            return text
        self._nodes -= nodes
        self.replaced += 1
        return value

    def _matching(self, value: Any, schema: JsonObject) -> JsonObject:
        """The first schema of a union that allows the value, else the schema itself."""
        for option in self._options(schema):
            if any(_has_type(value, name) for name in self._declared_types(option)):
                return option
        return schema

    def _declared_types(self, schema: JsonObject) -> frozenset[str]:
        """All types that a schema or its unions name."""
        known = self._types.get(id(schema))
        if known is None:
            own = schema.get("type")
            names = cast("list[Any]", own) if isinstance(own, list) else [own]
            types = frozenset(name for name in names if isinstance(name, str) and name in _CLASSES)
            known = types.union(*(self._declared_types(option) for option in self._options(schema)))
            self._types[id(schema)] = known
        return known

    def _options(self, schema: JsonObject) -> Iterator[JsonObject]:
        for keyword in ("anyOf", "oneOf"):
            options = schema.get(keyword)
            for option in cast("list[Any]", options) if isinstance(options, list) else ():
                self._steps -= 1
                if self._steps < 0:
                    raise _StepsError
                if isinstance(option, dict):
                    yield cast("JsonObject", option)


def _first_object(*values: object) -> JsonObject:
    """The first of the values that is an object."""
    return next((schema for value in values if (schema := as_object(value)) is not None), _ANY)


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _CLASSES[name])


def _encoded(value: Any) -> bytes:
    """JSON text in UTF-8. Raises ValueError."""
    try:
        # Upstream's MCP SDK sends NaN and infinity, which its `json.loads` reads, as null.
        return to_json(value, inf_nan_mode="null")
    except ValueError:
        # Unpaired surrogates, which are escaped here.
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
