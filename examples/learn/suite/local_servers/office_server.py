"""MCP servers `shelf` and `mail`. Run as `office_server.py shelf|mail WORKSPACE`.

Written without an SDK, whose import takes most of a second: training opens thousands of sandboxes.
"""

import json
import sys
from pathlib import Path

TEXT = {"type": "string", "maxLength": 40}
MAX_LINES = 20
"""Orders, or deliveries, of one attempt."""


class ToolError(Exception):
    """The message is the reply to the agent."""


class Shelf:
    """A shelf and its order list, `orders.txt`."""

    def __init__(self, workspace: Path) -> None:
        self._stock = json.loads((workspace / "stock.json").read_text())
        self._orders = workspace / "orders.txt"

    def list(self) -> str:
        """List the products, each after its state."""
        return "\n".join(f"{state} {product}" for product, state in self._stock.items())

    def order(self, state: str, product: str) -> str:
        """Order a product that is in this state."""
        if self._stock.get(product) != state:
            raise ToolError(f"no {state} {product}")
        append(self._orders, product)
        return f"ordered {product}"


class Mail:
    """Letters, each of a kind and for a person with a room, and the deliveries, `deliveries.txt`."""

    def __init__(self, workspace: Path) -> None:
        self._office = json.loads((workspace / "office.json").read_text())
        self._deliveries = workspace / "deliveries.txt"

    def list(self) -> str:
        """List the letters: kind, name and room."""
        rooms = self._office["rooms"]
        return "\n".join(f"{kind} {name} {rooms[name]}" for name, kind in self._office["letters"].items())

    def deliver(self, kind: str, name: str, room: str) -> str:
        """Deliver a letter of this kind to a room."""
        if self._office["letters"].get(name) != kind:
            raise ToolError(f"no {kind} {name}")
        if room not in self._office["rooms"].values():
            raise ToolError(f"no room {room}")
        append(self._deliveries, f"{name} {room}")
        return f"delivered {name} {room}"


def append(file: Path, line: str) -> None:
    """Append a line, unless the agent has written enough of them."""
    lines = file.read_text().splitlines() if file.exists() else []
    if len(lines) >= MAX_LINES:
        raise ToolError("too many")
    file.write_text("\n".join([*lines, line]) + "\n")


TOOLS = {
    "shelf": (Shelf, {"list": [], "order": ["state", "product"]}),
    "mail": (Mail, {"list": [], "deliver": ["kind", "name", "room"]}),
}


def answer(desk: Shelf | Mail, parameters: dict[str, list[str]], method: str, params: dict) -> dict | None:
    """The result of a request; None for an unknown method."""
    if method == "initialize":
        version = params.get("protocolVersion", "2025-06-18")
        server = {"name": type(desk).__name__.lower(), "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "ping":
        return {}
    if method == "tools/list":
        return {"tools": [describe(getattr(desk, name), names) for name, names in parameters.items()]}
    if method == "tools/call":
        try:
            text, failed = call(desk, parameters, params), False
        except ToolError as error:
            text, failed = str(error), True
        return {"content": [{"type": "text", "text": text}], "isError": failed}
    return None


def describe(function, names: list[str]) -> dict:
    """A tool as `tools/list` shows it."""
    schema = {"type": "object", "properties": dict.fromkeys(names, TEXT), "required": names}
    schema["additionalProperties"] = False
    return {"name": function.__name__, "description": function.__doc__, "inputSchema": schema}


def call(desk: Shelf | Mail, parameters: dict[str, list[str]], params: dict) -> str:
    """Call a tool. Raises ToolError for an unknown one or wrong arguments."""
    names = parameters.get(params.get("name"))
    arguments = params.get("arguments") or {}
    if names is None:
        raise ToolError("no such tool")
    if set(arguments) != set(names) or not all(isinstance(value, str) for value in arguments.values()):
        raise ToolError("wrong arguments")
    return getattr(desk, params["name"])(**arguments)


def main() -> None:
    """Answer the requests on stdin, one a line, until it is closed."""
    make, parameters = TOOLS[sys.argv[1]]
    desk = make(Path(sys.argv[2]))
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result = answer(desk, parameters, request["method"], request.get("params") or {})
        reply = (
            {"error": {"code": -32601, "message": "no such method"}} if result is None else {"result": result}
        )
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply}), flush=True)


if __name__ == "__main__":
    main()
