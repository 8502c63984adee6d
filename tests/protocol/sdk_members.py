"""The private members of the `mcp` SDK that `decathlon_mcp/protocol/sdk.py` depends on, with fingerprints.

To upgrade the SDK: read what changed in the members that `test_sdk_members.py` names, adapt `sdk.py`, replace
`FINGERPRINTS` by the output of `python -m tests.protocol.sdk_members`, and raise the limit of `mcp` in
`pyproject.toml`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

Kind = Literal["source", "signature"]


@dataclass(frozen=True, slots=True)
class Member:
    """A function or class of the SDK. `reason`: what `sdk.py` depends on.

    `kind`: `source` where `sdk.py` depends on what the member does, `signature` where it only calls it.
    """

    module: str
    name: str
    kind: Kind
    reason: str


MANAGER = "mcp.server.streamable_http_manager"
TRANSPORT = "mcp.server.streamable_http"
MEMBERS = (
    Member(
        MANAGER,
        "StreamableHTTPSessionManager.__init__",
        "source",
        "`_server_instances` is a dict of transports by session id",
    ),
    Member(
        MANAGER,
        "StreamableHTTPSessionManager._handle_stateful_request",
        "source",
        "sessions come from `_admit_session`, requests go to `_server_instances`",
    ),
    Member(
        MANAGER,
        "StreamableHTTPSessionManager._serve_opening_request",
        "source",
        "the session's task starts in the context of its first POST and ends in `_discard_session`; "
        "`_run_revived` does the same for a connection after its handshake",
    ),
    Member(MANAGER, "StreamableHTTPSessionManager.run", "source", "sets `_task_group` and `_lifespan_state`"),
    Member(
        MANAGER,
        "StreamableHTTPSessionManager._admit_session",
        "source",
        "`SessionManagerBase._admit_session` is a copy of it",
    ),
    Member(
        MANAGER,
        "StreamableHTTPSessionManager._discard_session",
        "source",
        "`SessionManagerBase._discard_session` extends it; it can be called twice",
    ),
    Member(
        TRANSPORT,
        "StreamableHTTPServerTransport.__init__",
        "signature",
        "`SessionManagerBase._admit_session` calls it",
    ),
    Member(
        TRANSPORT,
        "StreamableHTTPServerTransport.connect",
        "source",
        "its message router reads `is_json_response_enabled` in the context of the session's task, and "
        "passes every message to `_event_store`",
    ),
    Member(
        TRANSPORT,
        "StreamableHTTPServerTransport._message_metadata",
        "source",
        "reads `is_json_response_enabled` in the context of a POST; `dispatch` calls it",
    ),
    Member(
        TRANSPORT,
        "StreamableHTTPServerTransport._mint_priming_event",
        "source",
        "the only other use of `_event_store` for a POST",
    ),
    Member(
        TRANSPORT,
        "StreamableHTTPServerTransport._terminate_unanswered_request",
        "source",
        "answers a request that was cancelled",
    ),
    Member(
        TRANSPORT,
        "StreamableHTTPServerTransport._handle_get_request",
        "source",
        "replaced for a GET with an event id",
    ),
    Member(
        TRANSPORT,
        "StreamableHTTPServerTransport._validate_accept_header",
        "source",
        "reads `is_json_response_enabled` in the context of a POST",
    ),
    Member(
        TRANSPORT,
        "StreamableHTTPServerTransport._handle_post_request",
        "source",
        "reads `is_json_response_enabled` in the context of a POST; replaced for requests that can be "
        "resumed, which are dispatched and checked like this",
    ),
    Member(
        TRANSPORT,
        "StreamableHTTPServerTransport.close_standalone_sse_stream",
        "signature",
        "`SessionManagerBase.close_standalone_streams` calls it",
    ),
    Member(
        "mcp.server.session", "ServerSession.__init__", "source", "sets `_connection` and `_request_outbound`"
    ),
    Member(
        "mcp.server.connection", "Connection.__init__", "source", "sets `state`, `outbound` and `session_id`"
    ),
    Member(
        "mcp.server.connection",
        "Connection.initialize_accepted",
        "source",
        "whether `initialize` was accepted; always true without sessions",
    ),
    Member("mcp.server.runner", "serve_connection", "source", "`_run_revived` calls it"),
    Member("mcp.server.runner", "serve_loop", "source", "`_run_revived` makes the same dispatcher"),
    Member(
        "mcp.shared.jsonrpc_dispatcher", "JSONRPCDispatcher.__init__", "signature", "`_run_revived` calls it"
    ),
    Member(
        TRANSPORT,
        "StreamableHTTPServerTransport.handle_request",
        "source",
        "a session is idle without requests in flight; `SessionTransport.serving` counts one as well",
    ),
    Member(
        TRANSPORT,
        "StreamableHTTPServerTransport.terminate",
        "source",
        "every session that ends is terminated, which ends the calls of `exchanges`",
    ),
    Member(
        "mcp.shared.jsonrpc_dispatcher",
        "JSONRPCDispatcher._dispatch_notification",
        "source",
        "which requests `notifications/cancelled` cancels; `SessionTransport` cancels those of `exchanges`",
    ),
    Member("mcp.shared.dispatcher", "coerce_request_id", "source", "which ids are the same"),
    Member(
        "mcp.server._streamable_http_modern",
        "handle_modern_request",
        "source",
        "what is checked of a sessionless request, and how it is answered: `recognition` and `exchanges`",
    ),
    Member(
        "mcp.shared.inbound",
        "classify_inbound_request",
        "source",
        "`recognition` accepts a part of what it accepts",
    ),
    Member(
        "mcp.server.transport_security",
        "TransportSecurityMiddleware.validate_request",
        "source",
        "`recognition` accepts a part of what it accepts",
    ),
    Member("mcp.shared.dispatcher", "Outbound.notify", "signature", "`send_notification` calls it"),
    Member("mcp.shared._stream_protocols", "ReadStream", "source", "annotates the streams of a connection"),
    Member("mcp.shared._stream_protocols", "WriteStream", "source", "annotates the streams of a connection"),
)
FINGERPRINTS: Mapping[str, str] = {
    "StreamableHTTPSessionManager.__init__": "2f1d8b2129346c0d",
    "StreamableHTTPSessionManager._handle_stateful_request": "0b08e0f7443c950f",
    "StreamableHTTPSessionManager._serve_opening_request": "6c38ee065b46d593",
    "StreamableHTTPSessionManager.run": "1a15755e38e2840d",
    "StreamableHTTPSessionManager._admit_session": "c3ebb2cc7ff5c617",
    "StreamableHTTPSessionManager._discard_session": "204a98b26dfe31f3",
    "StreamableHTTPServerTransport.__init__": "80ff51d03ee18a74",
    "StreamableHTTPServerTransport.connect": "5a9abc56775885b2",
    "StreamableHTTPServerTransport._message_metadata": "ecb682aeddc9cd37",
    "StreamableHTTPServerTransport._mint_priming_event": "2c33bce23fc10a27",
    "StreamableHTTPServerTransport._terminate_unanswered_request": "36b4db45645f66b6",
    "StreamableHTTPServerTransport._handle_get_request": "9b5d07b3683d363e",
    "StreamableHTTPServerTransport._validate_accept_header": "72e5e42433481185",
    "StreamableHTTPServerTransport._handle_post_request": "3b7a2ff778700629",
    "StreamableHTTPServerTransport.close_standalone_sse_stream": "f4ca892d9e9fd8f6",
    "ServerSession.__init__": "b118ad93cf6f5e9d",
    "Connection.__init__": "5f1f1f57ae4a407d",
    "Connection.initialize_accepted": "bf53b1856eff748e",
    "serve_connection": "7ad53456a94be711",
    "serve_loop": "24c9dd4e4c6a0a76",
    "JSONRPCDispatcher.__init__": "26e942f32540f10a",
    "StreamableHTTPServerTransport.handle_request": "96c057e6787a5cd7",
    "StreamableHTTPServerTransport.terminate": "d641fbe98b0e99d9",
    "JSONRPCDispatcher._dispatch_notification": "7939a89fda39f352",
    "coerce_request_id": "16d9a38c829908aa",
    "handle_modern_request": "888cf9b70260ec25",
    "classify_inbound_request": "b08febac8cbd2971",
    "TransportSecurityMiddleware.validate_request": "eca70bc853fcd004",
    "Outbound.notify": "779ecbbf5dbb74cd",
    "ReadStream": "394c24891fe5e4fd",
    "WriteStream": "058b2ead3e14beef",
}


def fingerprint(member: Member) -> str | None:
    """The fingerprint of the installed SDK's member; None if the member is missing."""
    try:
        value: Any = attrgetter(member.name)(importlib.import_module(member.module))
    except (ImportError, AttributeError):
        return None
    value = inspect.unwrap(getattr(value, "fget", value))
    text = normalized(inspect.getsource(value)) if member.kind == "source" else parameters(value)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed(members: Iterable[Member], fingerprints: Mapping[str, str]) -> list[str]:
    """One sentence for each member whose fingerprint is not the given one."""
    return [
        f"{member.module}.{member.name} {'is missing' if current is None else 'changed'}: {member.reason}"
        for member in members
        if (current := fingerprint(member)) is None or current != fingerprints.get(member.name)
    ]


def parameters(function: Callable[..., object]) -> str:
    """A function's parameters and defaults, without types: versions of Python print them differently."""
    signature = inspect.signature(function)
    untyped = [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(untyped))


def normalized(source: str) -> str:
    """A function's or class's source without comments, docstrings and white space."""
    # By positions in the text, because the output of `ast.unparse` differs between versions of Python.
    source = textwrap.dedent(source)
    lines = source.splitlines()
    for (row, start), end in comments(source):
        lines[row - 1] = lines[row - 1][:start] + lines[row - 1][end:]
    for first, last in docstrings(source):
        lines[first - 1 : last] = [""] * (last - first + 1)
    return "".join("".join(lines).split())


def comments(source: str) -> Iterator[tuple[tuple[int, int], int]]:
    """Row and column of each comment, and the column behind it."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start, token.end[1]


def docstrings(source: str) -> Iterator[tuple[int, int]]:
    """First and last line of each string that is a statement, such as docstrings."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            assert node.end_lineno is not None
            yield node.lineno, node.end_lineno


def table(members: Iterable[Member]) -> str:
    """`FINGERPRINTS` for the installed SDK. Raises LookupError for a member that is missing."""
    rows: list[str] = []
    for member in members:
        current = fingerprint(member)
        if current is None:
            raise LookupError(f"{member.module}.{member.name} is missing")
        rows.append(f'    "{member.name}": "{current}",\n')
    return f"FINGERPRINTS: Mapping[str, str] = {{\n{''.join(rows)}}}"


if __name__ == "__main__":
    print(table(MEMBERS))  # noqa: T201
