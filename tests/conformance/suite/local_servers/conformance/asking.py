"""Tools that ask the client for something while they run: sampling, elicitation, roots.

With a handshake they send a request of their own; since 2026-07-28 the answer itself asks
(`input_required`) and the call comes again with what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from tool import Answer, Context, Tool, failed, schema, text


def elicit(message: str, wanted: Mapping[str, Any]) -> types.ElicitRequest:
    return types.ElicitRequest(
        params=types.ElicitRequestFormParams(message=message, requested_schema=dict(wanted))
    )


def sample(words: str) -> types.CreateMessageRequest:
    message = types.SamplingMessage(role="user", content=types.TextContent(text=words))
    return types.CreateMessageRequest(
        params=types.CreateMessageRequestParams(messages=[message], max_tokens=100)
    )


def offered(ctx: Context, request: types.InputRequest) -> bool:
    """Did the client say that it can answer this?"""
    declared = ctx.session.client_capabilities
    if declared is None:
        return False
    match request:
        case types.ElicitRequest():
            return declared.elicitation is not None
        case types.CreateMessageRequest():
            return declared.sampling is not None
        case _:
            return declared.roots is not None


@dataclass(frozen=True, slots=True)
class Rounds:
    """Asks in rounds, each of them requests by key; `keeps_state`: a state goes along that must come back."""

    rounds: tuple[Mapping[str, types.InputRequest], ...]
    keeps_state: bool

    async def __call__(self, ctx: Context, params: types.CallToolRequestParams) -> Answer:
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            return failed(f"Revision {ctx.protocol_version} has no input_required.")
        done = int(params.request_state or 0)
        if self.rounds[done].keys() <= (params.input_responses or {}).keys():
            done += 1
        if done == len(self.rounds):
            return text("state-ok: all that was asked for has come.")
        asked = {key: request for key, request in self.rounds[done].items() if offered(ctx, request)}
        if not asked:
            raise MCPError(
                types.MISSING_REQUIRED_CLIENT_CAPABILITY, "The client offers none of what is needed"
            )
        return types.InputRequiredResult(
            input_requests=asked, request_state=str(done) if self.keeps_state else None
        )


@dataclass(frozen=True, slots=True)
class Once:
    """Asks once, by a request of its own, and tells what came."""

    request: Callable[[types.CallToolRequestParams], types.ElicitRequest | types.CreateMessageRequest]

    async def __call__(self, ctx: Context, params: types.CallToolRequestParams) -> Answer:
        request = self.request(params)
        if not offered(ctx, request):
            return failed(f"The client does not offer {request.method}.")
        came = await ctx.session.send_request(
            request,
            types.ElicitResult if isinstance(request, types.ElicitRequest) else types.CreateMessageResult,
            metadata=ServerMessageMetadata(related_request_id=ctx.request_id),
        )
        return text(came.model_dump_json(by_alias=True, exclude_none=True))


def rounds(what: str, *asked: Mapping[str, types.InputRequest], keeps_state: bool = False) -> Tool:
    name = f"test_input_required_result_{what}"
    return Tool(name, "Asks the client by input_required.", Rounds(asked, keeps_state))


def once(
    name: str,
    request: Callable[[types.CallToolRequestParams], types.ElicitRequest | types.CreateMessageRequest],
    argument: str | None = None,
) -> Tool:
    takes = schema(required=(argument,), **{argument: {"type": "string"}}) if argument else schema()
    return Tool(name, "Asks the client by a request of its own.", Once(request), takes)


def argument(params: types.CallToolRequestParams, name: str) -> str:
    return str((params.arguments or {}).get(name, ""))


STRING = {"type": "string"}
NAME = elicit("What is your name?", schema(name=STRING, required=("name",)))
COLOUR = elicit("What is your favourite colour?", schema(color=STRING, required=("color",)))
CONFIRM = elicit("Is that so?", schema(ok={"type": "boolean"}, required=("ok",)))
CAPITAL = sample("What is the capital of France?")
ROOTS = types.ListRootsRequest()

LOGIN = schema(username=STRING, email=STRING, required=("username", "email"))
DEFAULTS = schema(
    name={"type": "string", "default": "John Doe"},
    age={"type": "integer", "default": 30},
    score={"type": "number", "default": 95.5},
    status={"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    verified={"type": "boolean", "default": True},
)
PLAIN = ["option1", "option2", "option3"]
TITLED = [{"const": f"value{n}", "title": f"Value {n}"} for n in (1, 2, 3)]
ENUMS = schema(
    untitledSingle={"type": "string", "enum": PLAIN},
    titledSingle={"type": "string", "oneOf": TITLED},
    legacyEnum={"type": "string", "enum": ["opt1", "opt2"], "enumNames": ["Option One", "Option Two"]},
    untitledMulti={"type": "array", "items": {"type": "string", "enum": PLAIN}},
    titledMulti={"type": "array", "items": {"anyOf": TITLED}},
)

TOOLS = (
    once("test_sampling", lambda params: sample(argument(params, "prompt")), "prompt"),
    once("test_elicitation", lambda params: elicit(argument(params, "message"), LOGIN), "message"),
    once("test_elicitation_sep1034_defaults", lambda _: elicit("Who are you?", DEFAULTS)),
    once("test_elicitation_sep1330_enums", lambda _: elicit("Choose.", ENUMS)),
    rounds("elicitation", {"user_name": NAME}),
    rounds("sampling", {"capital_question": CAPITAL}),
    rounds("list_roots", {"client_roots": ROOTS}),
    rounds("request_state", {"confirm": CONFIRM}, keeps_state=True),
    rounds(
        "multiple_inputs",
        {"user_name": NAME, "greeting": CAPITAL, "client_roots": ROOTS},
        keeps_state=True,
    ),
    rounds("multi_round", {"step1": NAME}, {"step2": COLOUR}, keeps_state=True),
    rounds("tampered_state", {"confirm": CONFIRM}, keeps_state=True),
    rounds("capabilities", {"sample": CAPITAL, "ask": NAME}, keeps_state=True),
    Tool("test_streaming_elicitation", "Asks the client.", Rounds(({"user_name": NAME},), False)),
)
