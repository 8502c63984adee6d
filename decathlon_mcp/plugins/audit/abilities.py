"""Abilities of an agent by a task's tools: read, change, write a file, run a command; and calls that fit."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from decathlon_client.client_values import JsonObject, Tool, as_object, as_objects

Need: TypeAlias = Literal["file", "shell", "root"]
"""What an attack needs of the tools: to write a file, a shell, or a shell as root."""

READING = re.compile(
    r"(?:^|_)(?:read|list|get|search|find|show|describe|view|query|fetch|count|info|stat|head|tail|tree|"
    r"status|log|diff|preview|load|check|validate)(?:_|$)"
)
REMOVING = re.compile(r"(?:^|_)(?:delete|remove|unlink|rm|drop|clear)(?:_|$)")
_SHELL = re.compile(r"shell|bash|terminal|command|exec|run|python|code", re.IGNORECASE)
_WRITING = re.compile(r"(?:^|_)(?:write|create|save|put)(?:_|$)")
_FOLDER = re.compile(r"(?:^|_)(?:directory|folder|dir)(?:_|$)")
_COMMANDS, _CODES = ("command", "cmd", "script", "shell_command"), ("code", "source", "program")
_PATHS = ("path", "file_path", "filepath", "filename", "file", "file_name")
_CONTENTS = ("content", "contents", "text", "data", "body", "file_text")
CALL_SECONDS = 90.0
"""What a call may take: about twice as long as the longest of the commands below."""
RUN_SECONDS = 80
"""What a command may take, where the tool lets its caller choose: less than the call, so that the tool itself
says that the time is up. The longest of 3,154 commands took 47 s, when 15 processes shared a processor."""
MAX_DEPTH = 6
"""Levels of a schema for which values are made."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A tool that runs commands of a shell, or Python code that can run them."""

    tool: str
    argument: str
    is_python: bool
    has_timeout: bool = False
    """Whether an argument says after how many seconds it ends what it runs."""

    def call(self, command: str) -> JsonObject:
        """The arguments that run a command of a shell."""
        limit = {"timeout": RUN_SECONDS} if self.has_timeout else {}
        if self.is_python:
            run = f"subprocess.run(['sh', '-c', {command!r}], capture_output=True)"
            show = "print((done.stdout + done.stderr).decode(errors='replace'))"
            return {self.argument: f"import subprocess\ndone = {run}\n{show}", **limit}
        return {self.argument: command, **limit}


@dataclass(frozen=True, slots=True)
class Writer:
    """A tool that writes a text into a file of the workspace."""

    tool: str
    path: str
    content: str
    folder: str = ""
    """What comes before a path in the workspace, for a tool that takes absolute paths only."""

    def call(self, path: str, content: str) -> JsonObject:
        return {self.path: f"{self.folder}{path}", self.content: content}


@dataclass(frozen=True, slots=True)
class Abilities:
    """What was shown to work, by a call in a sandbox.

    `is_root`: what the runner runs is root's. `repositories`: folders of the workspace that git keeps.
    """

    runner: Runner | None = None
    writer: Writer | None = None
    is_root: bool = False
    repositories: tuple[str, ...] = ()

    def can(self, need: Need) -> bool:
        match need:
            case "file":
                return self.runner is not None or self.writer is not None
            case "shell":
                return self.runner is not None
            case "root":
                return self.runner is not None and self.is_root


def runners(tools: Sequence[Tool]) -> list[Runner]:
    """The tools that may run commands, the likeliest first."""
    found: list[Runner] = []
    for tool in tools:
        if _SHELL.search(_own_name(tool)):
            texts, has_timeout = _texts(tool), "timeout" in _properties(tool)
            for names, is_python in ((_COMMANDS, False), (_CODES, True)):
                argument = next((name for name in names if name in texts), None)
                found += [Runner(tool.name, argument, is_python, has_timeout)] if argument else []
    return sorted(found, key=lambda runner: runner.is_python)


def writers(tools: Sequence[Tool]) -> list[Writer]:
    """The tools that may write a text into a file."""
    found: list[Writer] = []
    for tool in tools:
        texts = _texts(tool)
        path = next((name for name in _PATHS if name in texts), None)
        content = next((name for name in _CONTENTS if name in texts), None)
        name = _own_name(tool)
        if path and content and _WRITING.search(name) and not _FOLDER.search(name):
            found.append(Writer(tool.name, path, content))
    return found


def is_reading(tool: Tool) -> bool:
    """Whether a call of the tool changes nothing: it says so, or its name does."""
    annotations = as_object(tool.raw.get("annotations")) or {}
    if isinstance(hint := annotations.get("readOnlyHint"), bool):
        return hint
    return READING.search(_own_name(tool)) is not None


def is_removing(tool: Tool) -> bool:
    """Whether the tool's name says that it removes something."""
    return REMOVING.search(_own_name(tool)) is not None


def is_source(tool: Tool, prompt: str) -> bool:
    """Whether the prompt names the tool's server, as one to ask, and the tool may be what answers.

    Tools that read files or run commands are not: what they should not show depends on the place.
    """
    server = "[-_ ]".join(map(re.escape, re.split("[-_]", tool.name.partition("__")[0])))
    is_named = re.search(rf"(?<!\w){server}(?!\w)", prompt, re.IGNORECASE) is not None
    changes = is_removing(tool) or _WRITING.search(_own_name(tool))
    return is_named and not changes and path_argument(tool) is None and not runners([tool])


def path_argument(tool: Tool) -> str | None:
    """The argument of a tool that names a file; None if there is none."""
    return next((name for name in _PATHS if name in _texts(tool)), None)


class CallMaker:
    """Makes arguments that fit a tool's schema, the same arguments for the same seed.

    `words`: texts that mean something to the task, such as names of its files.
    """

    def __init__(self, seed: str, words: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._words = [*words, ".", "a", "result.txt", "2025-01-01"]

    def choose(self, tools: Sequence[Tool]) -> tuple[Tool, JsonObject]:
        """One of the tools, and arguments for it."""
        tool = self._random.choice(tools)
        return tool, self.arguments(tool)

    def position(self, count: int) -> int:
        """A number below `count`."""
        return self._random.randrange(count)

    def arguments(self, tool: Tool) -> JsonObject:
        return self._object(tool.input_schema, tool.input_schema, 0)

    def _value(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
        schema = _resolve(schema, root)
        if "const" in schema:
            return schema["const"]
        if isinstance(values := schema.get("enum"), list) and values:
            return self._random.choice(cast("list[Any]", values))
        for word in ("anyOf", "oneOf", "allOf"):
            if branches := as_objects(schema.get(word)):
                return (
                    self._value(self._random.choice(branches), root, depth + 1) if depth < MAX_DEPTH else None
                )
        match self._random.choice(_kinds(schema)):
            case "integer":
                return self._number(schema, whole=True)
            case "number":
                return self._number(schema, whole=False)
            case "boolean":
                return self._random.random() < 0.5
            case "null":
                return None
            case "array":
                items = as_object(schema.get("items")) or {"type": "string"}
                least = schema.get("minItems")
                count = max(least if isinstance(least, int) else 0, self._random.randrange(3))
                return (
                    [self._value(items, root, depth + 1) for _ in range(min(count, 8))]
                    if depth < MAX_DEPTH
                    else []
                )
            case "object":
                return self._object(schema, root, depth + 1) if depth < MAX_DEPTH else {}
            case _:
                return self._random.choice(self._words)

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> JsonObject:
        properties = as_object(_resolve(schema, root).get("properties")) or {}
        required: set[str] = {*(schema.get("required") or ())}
        return {
            name: self._value(as_object(part) or {}, root, depth)
            for name, part in properties.items()
            if name in required or self._random.random() < 0.3
        }

    def _number(self, schema: Mapping[str, Any], *, whole: bool) -> float | int:
        low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
        least = float(low) if isinstance(low, (int, float)) else 0.0
        most = float(high) if isinstance(high, (int, float)) else least + 10
        return (
            self._random.randint(int(least), max(int(least), int(most)))
            if whole
            else round(self._random.uniform(least, most), 3)
        )


def _resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or what its `$ref` names in the same schema; empty if that is nothing."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: Any = root
        for part in reference[2:].split("/"):
            found = (as_object(found) or {}).get(part)
        schema = as_object(found) or {}
    return {}


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema allows; a text if it names none."""
    kind: object = schema.get("type")
    kinds = cast("list[object]", kind) if isinstance(kind, list) else [kind]
    return [str(each) for each in kinds if each] or ["string"]


def _own_name(tool: Tool) -> str:
    """Its name without that of its server, as lower-case words between `_`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", tool.name.rpartition("__")[2]).lower()


def _properties(tool: Tool) -> JsonObject:
    return as_object(tool.input_schema.get("properties")) or {}


def _texts(tool: Tool) -> set[str]:
    """The names of the arguments that take a text; the usual ones where the schema does not mention any."""
    if "properties" not in tool.input_schema:
        return {names[0] for names in (_PATHS, _CONTENTS, _COMMANDS, _CODES)}
    schemas = {name: as_object(part) or {} for name, part in _properties(tool).items()}
    return {
        name
        for name, schema in schemas.items()
        if any(each.get("type") == "string" for each in (schema, *as_objects(schema.get("anyOf"))))
    }
