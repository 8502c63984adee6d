"""Describes or serves a suite's own local tools, in a sandbox.

    python -c SOURCE '{"workspace": DIR, "code": {NEED: ADDRESS}}'
    python -c SOURCE '{"workspace": DIR, "code": {NEED: ADDRESS}, "tools": {NEED: [TOOL...]}}'

The first form writes {NEED: [TOOL...]} to the descriptor that DECATHLON_CHANNEL names, and exits. The second
is an MCP server on stdin and stdout that lists the given TOOLs and imports the code of one when it is first
called. ADDRESS is `module:name`, or `module:name(workspace)` for a function that makes the tools. It leads to
a tool of openai-agents, an async function, or a list of these.

Upstream's code runs unchanged, with the arguments that upstream's scaffold passes
(`utils/roles/task_agent.py`, `custom_run_impl.py`): a tool that raises gives the result
`Error running tool NAME: ...`. The package `agents` is replaced by a stub if the code works with it, because
importing the real one takes seconds. What the tools print goes to stderr. Standard library only, any Python
from 3.9.
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
"""The server's name in upstream's spelling of tool names."""
JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
PROTOCOL = "2025-06-18"
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602


def main() -> None:
    order = json.loads(sys.argv[1])
    sys.argv[1:] = []
    if "tools" not in order:
        described = {
            need: [tool.describe() for tool in find(address, order["workspace"])]
            for need, address in order["code"].items()
        }
        with os.fdopen(int(os.environ["DECATHLON_CHANNEL"]), "w", encoding="utf-8") as channel:
            json.dump(described, channel)
        return
    Server(order).serve()
    os._exit(0)  # threads of calls may still run


class AgentsStub:
    """Replaces the classes of `agents.tool` that the tools use: keeps its arguments as attributes."""

    def __init__(self, context: Any = None, **attributes: Any) -> None:
        self.context = context
        self.__dict__.update(attributes)


class AgentTool:
    """A tool of openai-agents, or of the stub."""

    def __init__(self, tool: Any, workspace: str) -> None:
        self.name = tool.name
        self._tool = tool
        self._workspace = workspace

    def describe(self) -> dict[str, Any]:
        schema = self._tool.params_json_schema
        return description(self.name, self._tool.description, schema)

    async def call(self, arguments: dict[str, Any]) -> Any:
        context = AgentsStub({"_agent_workspace": self._workspace})
        return await self._tool.on_invoke_tool(context, json.dumps(arguments))


class FunctionTool:
    """An async function, described by its docstring, its signature and the section `Args:`."""

    def __init__(self, function: Any) -> None:
        self.name = function.__name__
        self._function = function

    def describe(self) -> dict[str, Any]:
        summary, _, arguments = inspect.cleandoc(self._function.__doc__ or "").partition("Args:")
        descriptions: dict[str, str] = {}
        for line in arguments.splitlines():
            name, _, text = line.strip().partition(": ")
            descriptions[name] = text
        properties: dict[str, dict[str, Any]] = {}
        for name, parameter in inspect.signature(self._function).parameters.items():
            annotation = parameter.annotation
            type_name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
            properties[name] = {"type": JSON_TYPES[type_name]} if type_name in JSON_TYPES else {}
            if descriptions.get(name):
                properties[name]["description"] = descriptions[name]
            if parameter.default is not parameter.empty:
                properties[name]["default"] = parameter.default
        required = [name for name, schema in properties.items() if "default" not in schema]
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        if required:
            schema["required"] = required
        return description(self.name, summary.strip(), schema)

    async def call(self, arguments: dict[str, Any]) -> Any:
        return await self._function(**arguments)


def description(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name.removeprefix(PREFIX), "description": text, "inputSchema": schema}


def find(address: str, workspace: str) -> list[AgentTool | FunctionTool]:
    """The tools at an address of the suite's code."""
    path, is_factory, _ = address.partition("(workspace)")
    module, _, name = path.partition(":")
    value: Any = getattr(load(module), name)
    if is_factory:
        value = value(workspace)
    tools: list[Any] = value if type(value) in (list, tuple) else [value]
    return [
        AgentTool(tool, workspace) if hasattr(tool, "on_invoke_tool") else FunctionTool(tool)
        for tool in tools
    ]


def load(module: str) -> Any:
    """Import a module of the suite, with the real openai-agents only if the stub does not suffice."""
    package, tool = types.ModuleType("agents"), types.ModuleType("agents.tool")
    package.__path__ = []
    package.tool = tool  # type: ignore[attr-defined]
    tool.FunctionTool = tool.RunContextWrapper = AgentsStub  # type: ignore[attr-defined]
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "agents"}
    sys.modules.update({"agents": package, "agents.tool": tool})
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError):
        unload_agents()
        sys.modules.update(real)
        return importlib.import_module(module)
    finally:
        if sys.modules.get("agents") is package:
            unload_agents()
            sys.modules.update(real)


def unload_agents() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "agents"]:
        del sys.modules[name]


class Server:
    """An MCP server on copies of stdin and stdout, which the tools cannot reach."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._workspace: str = order["workspace"]
        self._code: dict[str, str] = order["code"]
        self._tools: dict[str, list[dict[str, Any]]] = order["tools"]
        self._needs = {tool["name"]: need for need, tools in self._tools.items() for tool in tools}
        self._loaded: dict[str, dict[str, AgentTool | FunctionTool]] = {}
        self._load_lock = threading.Lock()
        self._write_lock = threading.Lock()

    def serve(self) -> None:
        """Answer requests until stdin ends."""
        requests, self._output = os.fdopen(os.dup(0), "rb"), os.dup(1)
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.dup2(2, 1)
        for line in requests:
            if not line.strip():
                continue
            message = json.loads(line)
            if "id" in message and "method" in message:
                self._handle(message["id"], message["method"], message.get("params") or {})

    def _handle(self, request_id: Any, method: str, params: dict[str, Any]) -> None:
        if method == "initialize":
            result: dict[str, Any] = {
                "protocolVersion": PROTOCOL,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "local", "version": "1"},
            }
            self._answer(request_id, result=result)
        elif method == "tools/list":
            self._answer(
                request_id, result={"tools": [tool for tools in self._tools.values() for tool in tools]}
            )
        elif method == "ping":
            self._answer(request_id, result={})
        elif method != "tools/call":
            self._answer(request_id, error={"code": METHOD_NOT_FOUND, "message": f"no method {method}"})
        elif params.get("name") not in self._needs:
            self._answer(
                request_id, error={"code": INVALID_PARAMS, "message": f"no tool {params.get('name')}"}
            )
        else:
            # Some tools block, so each call runs in a thread of its own.
            threading.Thread(target=self._call, args=(request_id, params), daemon=True).start()

    def _call(self, request_id: Any, params: dict[str, Any]) -> None:
        name, failed = params["name"], False
        try:
            tool = self._tool(name)
            name = tool.name
            text = str(asyncio.run(tool.call(params.get("arguments") or {})))
        except BaseException as error:  # noqa: BLE001  (SystemExit, too: no tool may end the server)
            text, failed = f"Error running tool {name}: {error}", True
        result: dict[str, Any] = {"content": [{"type": "text", "text": text}], "isError": failed}
        self._answer(request_id, result=result)

    def _tool(self, name: str) -> AgentTool | FunctionTool:
        need = self._needs[name]
        with self._load_lock:
            if need not in self._loaded:
                tools = find(self._code[need], self._workspace)
                self._loaded[need] = {tool.describe()["name"]: tool for tool in tools}
        return self._loaded[need][name]

    def _answer(self, request_id: Any, **fields: Any) -> None:
        data = json.dumps({"jsonrpc": "2.0", "id": request_id, **fields}).encode() + b"\n"
        with self._write_lock:
            while data:
                data = data[os.write(self._output, data) :]


if __name__ == "__main__":
    main()
