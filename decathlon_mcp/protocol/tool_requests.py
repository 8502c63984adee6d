"""A request for tools, as what serves it sees it: the same over HTTP and stdio, in every revision."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, TypeAlias

from mcp.server.connection import Connection

from decathlon_mcp.driver_client.replies import CallParams, Reply
from decathlon_mcp.episodes.operations import check_operation
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.protocol.context import RequestContext
from decathlon_mcp.protocol.envelopes import PROGRESS_TOKEN, RequestId
from decathlon_mcp.protocol.events import Kind
from decathlon_mcp.storage.logged_calls import Origin
from decathlon_mcp.types import JsonObject, as_object

OPERATION_KEY = "decathlon/operation"
"""Key in the `_meta` of a request with the id under which its client would send it again."""
ENVELOPE_PREFIX = "io.modelcontextprotocol/"

Result: TypeAlias = JsonObject | Reply
"""What a request for tools returns: a result, or the reply of a task's server."""


class ToolRequest(ABC):
    """A `tools/call` or `tools/list` that has passed the checks.

    `name` and `arguments` (JSON text of an object, None if there are none) are those of a call. `meta`: the
    params' `_meta`. `is_sessionless`: whether the protocol revision has no sessions. `connection`: that of
    the session, or of a process over stdio; None without a session. `can_stream`: notifications can be sent
    before the result.
    """

    def __init__(
        self,
        *,
        method: str,
        request_id: RequestId,
        name: str,
        arguments: bytes | None,
        meta: JsonObject,
        context: RequestContext,
        connection: Connection | None,
        is_sessionless: bool,
        can_stream: bool,
    ) -> None:
        self.method = method
        self.id = request_id
        self.name = name
        self.arguments = arguments
        self.meta = meta
        self.context = context
        self.connection = connection
        self.is_sessionless = is_sessionless
        self.can_stream = can_stream

    @property
    def session_id(self) -> str | None:
        return None if self.connection is None else self.connection.session_id

    @property
    def state(self) -> dict[str, Any]:
        """What is kept for the session."""
        return {} if self.connection is None else self.connection.state

    @property
    def progress_token(self) -> Any:
        return self.meta.get(PROGRESS_TOKEN)

    @property
    def has_operation(self) -> bool:
        """Whether the client has chosen an operation id for the request."""
        return OPERATION_KEY in self.meta

    @cached_property
    def origin(self) -> Origin:
        """By what the client knows the request when it sends it again. Raises BadRequestError."""
        operation = check_operation(self.meta[OPERATION_KEY]) if self.has_operation else None
        session = self.session_id
        return Origin(operation, session, None if session is None else self.id)

    @property
    def operation(self) -> str | None:
        """An id that stays the same when the client sends the request again; None if it has none."""
        return next(iter(self.origin.operations), None)

    @property
    def last_operation(self) -> str | None:
        """As `operation`, but in a session the one that a client has which comes back for the answer."""
        return next(reversed(self.origin.operations), None)

    @property
    def call_params(self) -> CallParams:
        """The parameters of a call, as the task's server gets them."""
        relayed = {
            key: value
            for key, value in self.meta.items()
            if key != OPERATION_KEY and not key.startswith(ENVELOPE_PREFIX)
        }
        return CallParams(self.arguments, relayed)

    def decoded_arguments(self) -> JsonObject | None:
        """The arguments of a call, decoded. Raises BadRequestError."""
        if self.arguments is None:
            return None
        try:
            return as_object(json.loads(self.arguments))
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the arguments are not valid JSON: {error}") from None

    @property
    @abstractmethod
    def base_url(self) -> str | None:
        """The server's public URL if configured, otherwise the one the client used; None without HTTP."""

    @abstractmethod
    async def accepted(self, kind: Kind, *, agent: str = "") -> None:
        """The request is on record where it needs to be: from now on its client may come back for the answer.

        `agent`: the agent's id of the episode, for a request at the lobby.
        """

    @abstractmethod
    async def notify(self, method: str, params: JsonObject, *, with_reply: bool = True) -> None:
        """Send a notification, before the reply or on the session's own stream."""

    @abstractmethod
    async def is_gone(self) -> bool:
        """Whether the connection broke on which the client waits for the reply."""
