"""What the metrics cost a tool call: a request through the ASGI middleware that counts it, and without."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks.samples import Samples, measure_in_turns
from decathlon_mcp.events import Called, Events, RequestRead
from decathlon_mcp.http.application import MeteredResponses
from decathlon_mcp.plugins.metrics.metrics import Metrics
from decathlon_mcp.protocol.requests import SCOPE_KEY, RequestContext

CALLS = 2_000
"""Calls in one sample: a single one takes as long as reading the clock."""
BODY = b"x" * 400


@dataclass(frozen=True, slots=True)
class Metering:
    """Times of one call in each way."""

    metered: Samples
    bare: Samples

    @property
    def cost_seconds(self) -> float:
        """What the metrics add. Of the fastest samples, because the difference is below the others' noise."""
        return min(self.metered.seconds) - min(self.bare.seconds)


async def measure_metering(*, rounds: int, warm_up: int) -> Metering:
    """Measure an application that reports one call for each request, and one that does not."""
    events = Events([Metrics()])
    emit = events.episode("suite", "task", "")

    async def respond(receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": BODY})

    async def reporting(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SCOPE_KEY] = context = RequestContext()
        events.emit(RequestRead(len(BODY)))
        context.called_at = perf_counter()
        emit(Called("ok", perf_counter()))
        context.replied_at = perf_counter()
        await respond(receive, send)

    async def bare(scope: Scope, receive: Receive, send: Send) -> None:
        # Every request has a context, metrics or not.
        scope[SCOPE_KEY] = RequestContext()
        await respond(receive, send)

    samples = await measure_in_turns(
        {
            "metered": lambda: _time_calls(MeteredResponses(reporting, events.emit)),
            "bare": lambda: _time_calls(bare),
        },
        rounds=rounds,
        warm_up=warm_up,
    )
    return Metering(samples["metered"], samples["bare"])


async def _time_calls(app: ASGIApp) -> float:
    """Seconds for one call, as the mean of CALLS."""

    async def receive() -> Message:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Message) -> None:
        pass

    started = perf_counter()
    for _ in range(CALLS):
        await app({"type": "http"}, receive, send)
    return (perf_counter() - started) / CALLS
