"""Runs inside a sandbox, sent along as source: the suite's own local tools, described or served.

    python -c SOURCE '{"workspace": DIR, "code": {NEED: ADDRESS}}'
    python -c SOURCE '{"workspace": DIR, "code": {NEED: ADDRESS}, "tools": {NEED: [TOOL...]}}'

The first writes {NEED: [TOOL...]} to the descriptor that DECATHLON_CHANNEL names and ends; the second is an
MCP server on stdin and stdout that lists the TOOLs it was given and imports the code of one when it is first
called. ADDRESS is `module:name`, or `module:name(workspace)` for a function that makes the tools. What is
there is a tool of openai-agents, an async function, or a list of these.

Upstream's code of a tool runs as it is, given what upstream's scaffold gives it (`utils/roles/task_agent.py`,
`custom_run_impl.py`): a tool that raises answers `Error running tool NAME: ...`. Only `agents.tool`, whose
import costs seconds and which these tools need for two class names, is stood in for where that suffices.
Standard library only, any Python from 3.9; what the tools print goes to stderr.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import threading
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PREFIX = "local-"
"""Upstream's spelling of the server's name, which is not part of a tool's own."""
JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
PROTOCOL = "2025-06-18"
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602


def main() -> None:
    order = json.loads(sys.argv[1])
    sys.argv[1:] = []
    if "tools" not in order:
        described = {
            need: [tool.described() for tool in find(address, order["workspace"])]
            for need, address in order["code"].items()
        }
        with os.fdopen(int(os.environ["DECATHLON_CHANNEL"]), "w", encoding="utf-8") as channel:
            json.dump(described, channel)
        return
    Server(order).serve()
    os._exit(0)  # whatever threads still run


class StandIn:
    """What `agents.tool` has that the tools name: a record of what it was made with."""

    def __init__(self, context: Any = None, **said: Any) -> None:
        self.context = context
        self.__dict__.update(said)


class AgentTool:
    """A tool of openai-agents, or of what stands in for it."""

    def __init__(self, tool: Any, workspace: str) -> None:
        self.name = tool.name
        self._tool = tool
        self._workspace = workspace

    def described(self) -> dict[str, Any]:
        schema = self._tool.params_json_schema
        return description(self.name, self._tool.description, schema)

    async def call(self, arguments: dict[str, Any]) -> Any:
        context = StandIn({"_agent_workspace": self._workspace})
        return await self._tool.on_invoke_tool(context, json.dumps(arguments))


class FunctionTool:
    """An async function: its docstring describes it, its signature and `Args:` the arguments."""

    def __init__(self, function: Any) -> None:
        self.name = function.__name__
        self._function = function

    def described(self) -> dict[str, Any]:
        about, _, rest = inspect.cleandoc(self._function.__doc__ or "").partition("Args:")
        said: dict[str, str] = {}
        for line in rest.splitlines():
            name, _, text = line.strip().partition(": ")
            said[name] = text
        properties: dict[str, dict[str, Any]] = {}
        for name, parameter in inspect.signature(self._function).parameters.items():
            kind = parameter.annotation
            word = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
            properties[name] = {"type": JSON_TYPES[word]} if word in JSON_TYPES else {}
            if said.get(name):
                properties[name]["description"] = said[name]
            if parameter.default is not parameter.empty:
                properties[name]["default"] = parameter.default
        required = [name for name, schema in properties.items() if "default" not in schema]
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        if required:
            schema["required"] = required
        return description(self.name, about.strip(), schema)

    async def call(self, arguments: dict[str, Any]) -> Any:
        return await self._function(**arguments)


def description(name: str, about: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name.removeprefix(PREFIX), "description": about, "inputSchema": schema}


def find(address: str, workspace: str) -> list[AgentTool | FunctionTool]:
    """The tools at an address of the suite's code."""
    path, made, _ = address.partition("(workspace)")
    module, _, name = path.partition(":")
    found: Any = getattr(load(module), name)
    if made:
        found = found(workspace)
    several: list[Any] = found if type(found) in (list, tuple) else [found]
    return [
        AgentTool(tool, workspace) if hasattr(tool, "on_invoke_tool") else FunctionTool(tool)
        for tool in several
    ]


def load(module: str) -> Any:
    """Import a module of the suite, with the real openai-agents only where the stand-in does not do."""
    package, tool = types.ModuleType("agents"), types.ModuleType("agents.tool")
    package.__path__ = []
    package.tool = tool  # type: ignore[attr-defined]
    tool.FunctionTool = tool.RunContextWrapper = StandIn  # type: ignore[attr-defined]
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "agents"}
    sys.modules.update({"agents": package, "agents.tool": tool})
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError):
        forget()
        sys.modules.update(real)
        return importlib.import_module(module)
    finally:
        if sys.modules.get("agents") is package:
            forget()
            sys.modules.update(real)


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "agents"]:
        del sys.modules[name]


class Server:
    """MCP on descriptors that no tool inherits. A call runs in a thread of its own: some of them block."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._workspace: str = order["workspace"]
        self._code: dict[str, str] = order["code"]
        self._offered: dict[str, list[dict[str, Any]]] = order["tools"]
        self._needs = {tool["name"]: need for need, tools in self._offered.items() for tool in tools}
        self._found: dict[str, dict[str, AgentTool | FunctionTool]] = {}
        self._finding = threading.Lock()
        self._writing = threading.Lock()

    def serve(self) -> None:
        """Until stdin ends."""
        reading, self._line = os.fdopen(os.dup(0), "rb"), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        for line in reading:
            if not line.strip():
                continue
            message = json.loads(line)
            if "id" in message and "method" in message:
                self._take(message["id"], message["method"], message.get("params") or {})

    def _take(self, number: Any, method: str, params: dict[str, Any]) -> None:
        if method == "initialize":
            hello: dict[str, Any] = {
                "protocolVersion": PROTOCOL,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "local", "version": "1"},
            }
            self._answer(number, result=hello)
        elif method == "tools/list":
            self._answer(
                number, result={"tools": [tool for tools in self._offered.values() for tool in tools]}
            )
        elif method == "ping":
            self._answer(number, result={})
        elif method != "tools/call":
            self._answer(number, error={"code": METHOD_NOT_FOUND, "message": f"no method {method}"})
        elif params.get("name") not in self._needs:
            self._answer(number, error={"code": INVALID_PARAMS, "message": f"no tool {params.get('name')}"})
        else:
            threading.Thread(target=self._call, args=(number, params), daemon=True).start()

    def _call(self, number: Any, params: dict[str, Any]) -> None:
        name, failed = params["name"], False
        try:
            tool = self._tool(name)
            name = tool.name
            text = str(asyncio.run(tool.call(params.get("arguments") or {})))
        except BaseException as error:  # noqa: BLE001  (SystemExit too: nothing of a tool's ends the server)
            text, failed = f"Error running tool {name}: {error}", True
        result: dict[str, Any] = {"content": [{"type": "text", "text": text}], "isError": failed}
        self._answer(number, result=result)

    def _tool(self, name: str) -> AgentTool | FunctionTool:
        need = self._needs[name]
        with self._finding:
            if need not in self._found:
                tools = find(self._code[need], self._workspace)
                self._found[need] = {tool.described()["name"]: tool for tool in tools}
        return self._found[need][name]

    def _answer(self, number: Any, **said: Any) -> None:
        data = json.dumps({"jsonrpc": "2.0", "id": number, **said}).encode() + b"\n"
        with self._writing:
            while data:
                data = data[os.write(self._line, data) :]


if __name__ == "__main__":
    main()
