"""Reading requests before MCP does: header values, and the parameters of a task's address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Self

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from decathlon_mcp.catalogue.draws import Draw
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.foreign_names import quoted
from decathlon_mcp.labels import parse_labels
from decathlon_mcp.protocol.lobby_tools import validate
from decathlon_mcp.protocol.requests import LAST_EVENT_KEY

RANDOM_TASK = "random"
"""Name in a task's address that stands for a drawn task."""
LABEL = "label"
"""Parameter of a task's address, `NAME=VALUE`; it can be repeated."""
LIST_PARAMETERS = frozenset({"needs", "without"})
MAX_PARAMETERS = 100
"""Parameters in a query. To group them takes quadratic time."""

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class StartParameters:
    """What the query of a task's address says about the episode that starts there.

    `draw`: the filters of the random address.
    """

    labels: Mapping[str, str]
    draw: Draw

    @classmethod
    def read(cls, request: Request) -> Self:
        """Raises BadRequestError for parameters that do not fit."""
        query, task = request.query_params, request.path_params["task_id"]
        if len(query.multi_items()) > MAX_PARAMETERS:
            raise BadRequestError(f"{quoted(task)}: more than {MAX_PARAMETERS} parameters")
        values: Mapping[str, object] = {
            name: items if name in LIST_PARAMETERS or len(items) > 1 else items[0]
            for name, items in ((name, query.getlist(name)) for name in query if name != LABEL)
        }
        if values and task != RANDOM_TASK:
            raise BadRequestError(
                f"a task's address has no parameter {', '.join(map(quoted, values))}; it takes `{LABEL}`"
            )
        return cls(parse_labels(query.getlist(LABEL)), validate(Draw, RANDOM_TASK, values))


class RawEndpoint:
    """An ASGI endpoint for `Route` that gets every method, with normalised header values."""

    # A class, because Starlette wraps a function into a request-response handler that accepts GET only.
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Spaces around a header's value are not part of it (RFC 9110, section 5.5). httptools, which uvicorn
        # 0.54 prefers where it is installed, keeps those after the value, and the SDK compares values
        # literally.
        headers = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        # mcp 2.3 sends no response to a GET with this header.
        for name, value in headers:
            if name == b"last-event-id":
                scope[LAST_EVENT_KEY] = value.decode("latin-1")
        scope["headers"] = [(name, value) for name, value in headers if name != b"last-event-id"]
        await self._endpoint(scope, receive, send)
