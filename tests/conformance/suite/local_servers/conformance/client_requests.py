"""Tools that need input from the client while they run: sampling, elicitation, roots.

Before revision 2026-07-28 the server sends a request to the client. Since then the tool returns
`input_required`, and the client repeats the call with the responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from tool import Context, Result, Tool, error_result, object_schema, text_result


def elicit(message: str, requested_schema: Mapping[str, Any]) -> types.ElicitRequest:
    return types.ElicitRequest(
        params=types.ElicitRequestFormParams(message=message, requested_schema=dict(requested_schema))
    )


def sample(prompt: str) -> types.CreateMessageRequest:
    message = types.SamplingMessage(role="user", content=types.TextContent(text=prompt))
    return types.CreateMessageRequest(
        params=types.CreateMessageRequestParams(messages=[message], max_tokens=100)
    )


def is_supported(ctx: Context, request: types.InputRequest) -> bool:
    """Return whether the client declared the capability for this request."""
    capabilities = ctx.session.client_capabilities
    if capabilities is None:
        return False
    match request:
        case types.ElicitRequest():
            return capabilities.elicitation is not None
        case types.CreateMessageRequest():
            return capabilities.sampling is not None
        case _:
            return capabilities.roots is not None


@dataclass(frozen=True, slots=True)
class InputRequired:
    """Returns `input_required` once per round, with that round's requests by key.

    `has_state`: the result has a `request_state`, which the client must send back.
    """

    rounds: tuple[Mapping[str, types.InputRequest], ...]
    has_state: bool

    async def __call__(self, ctx: Context, params: types.CallToolRequestParams) -> Result:
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            return error_result(f"Revision {ctx.protocol_version} has no input_required.")
        completed = int(params.request_state or 0)
        if self.rounds[completed].keys() <= (params.input_responses or {}).keys():
            completed += 1
        if completed == len(self.rounds):
            return text_result("state-ok: all requested input was received.")
        requests = {
            key: request for key, request in self.rounds[completed].items() if is_supported(ctx, request)
        }
        if not requests:
            raise MCPError(
                types.MISSING_REQUIRED_CLIENT_CAPABILITY, "The client has none of the required capabilities"
            )
        return types.InputRequiredResult(
            input_requests=requests, request_state=str(completed) if self.has_state else None
        )


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """Sends one request to the client and returns the response as JSON."""

    request: Callable[[types.CallToolRequestParams], types.ElicitRequest | types.CreateMessageRequest]

    async def __call__(self, ctx: Context, params: types.CallToolRequestParams) -> Result:
        request = self.request(params)
        if not is_supported(ctx, request):
            return error_result(f"The client does not support {request.method}.")
        response = await ctx.session.send_request(
            request,
            types.ElicitResult if isinstance(request, types.ElicitRequest) else types.CreateMessageResult,
            metadata=ServerMessageMetadata(related_request_id=ctx.request_id),
        )
        return text_result(response.model_dump_json(by_alias=True, exclude_none=True))


def input_required_tool(
    suffix: str, *rounds: Mapping[str, types.InputRequest], has_state: bool = False
) -> Tool:
    name = f"test_input_required_result_{suffix}"
    return Tool(name, "Requests input by `input_required`.", InputRequired(rounds, has_state))


def server_request_tool(
    name: str,
    request: Callable[[types.CallToolRequestParams], types.ElicitRequest | types.CreateMessageRequest],
    argument: str | None = None,
) -> Tool:
    schema = object_schema(required=(argument,), **{argument: STRING}) if argument else object_schema()
    return Tool(name, "Sends a request to the client.", ServerRequest(request), schema)


def string_argument(params: types.CallToolRequestParams, name: str) -> str:
    return str((params.arguments or {}).get(name, ""))


STRING = {"type": "string"}
NAME = elicit("What is your name?", object_schema(name=STRING, required=("name",)))
COLOUR = elicit("What is your favourite colour?", object_schema(color=STRING, required=("color",)))
CONFIRM = elicit("Do you confirm?", object_schema(ok={"type": "boolean"}, required=("ok",)))
CAPITAL = sample("What is the capital of France?")
ROOTS = types.ListRootsRequest()

LOGIN = object_schema(username=STRING, email=STRING, required=("username", "email"))
DEFAULTS = object_schema(
    name={"type": "string", "default": "John Doe"},
    age={"type": "integer", "default": 30},
    score={"type": "number", "default": 95.5},
    status={"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    verified={"type": "boolean", "default": True},
)
UNTITLED = ["option1", "option2", "option3"]
TITLED = [{"const": f"value{n}", "title": f"Value {n}"} for n in (1, 2, 3)]
ENUMS = object_schema(
    untitledSingle={"type": "string", "enum": UNTITLED},
    titledSingle={"type": "string", "oneOf": TITLED},
    legacyEnum={"type": "string", "enum": ["opt1", "opt2"], "enumNames": ["Option One", "Option Two"]},
    untitledMulti={"type": "array", "items": {"type": "string", "enum": UNTITLED}},
    titledMulti={"type": "array", "items": {"anyOf": TITLED}},
)

TOOLS = (
    server_request_tool("test_sampling", lambda params: sample(string_argument(params, "prompt")), "prompt"),
    server_request_tool(
        "test_elicitation", lambda params: elicit(string_argument(params, "message"), LOGIN), "message"
    ),
    server_request_tool("test_elicitation_sep1034_defaults", lambda _: elicit("Who are you?", DEFAULTS)),
    server_request_tool("test_elicitation_sep1330_enums", lambda _: elicit("Choose.", ENUMS)),
    input_required_tool("elicitation", {"user_name": NAME}),
    input_required_tool("sampling", {"capital_question": CAPITAL}),
    input_required_tool("list_roots", {"client_roots": ROOTS}),
    input_required_tool("request_state", {"confirm": CONFIRM}, has_state=True),
    input_required_tool(
        "multiple_inputs",
        {"user_name": NAME, "greeting": CAPITAL, "client_roots": ROOTS},
        has_state=True,
    ),
    input_required_tool("multi_round", {"step1": NAME}, {"step2": COLOUR}, has_state=True),
    input_required_tool("tampered_state", {"confirm": CONFIRM}, has_state=True),
    input_required_tool("capabilities", {"sample": CAPITAL, "ask": NAME}, has_state=True),
    Tool(
        "test_streaming_elicitation",
        "Requests input by `input_required`.",
        InputRequired(({"user_name": NAME},), has_state=False),
    ),
)
