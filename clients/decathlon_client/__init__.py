"""Play and train on Toolathlon's tasks through a decathlon-mcp server.

async with Decathlon("http://127.0.0.1:8765") as d:
    async with d.episode("find-rate-regression") as e:
        ...  # show e.prompt and e.tools to a model
        reply = await e.call("files__read_file", {"path": "complaint.md"})
        await e.claim_done("It was the commit of 18 February.")
        verdict = await e.evaluate()
        print(verdict.reward)

Names are loaded when they are first used: who needs only a part, such as `decathlon_client.client_values`,
does not load `mcp`.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from decathlon_client.attempts import Player, PlayerFailedError
    from decathlon_client.batch import Batch
    from decathlon_client.batch_results import Fault, Result, Summary, Tally, TaskSummary
    from decathlon_client.client_episode import Episode
    from decathlon_client.client_errors import (
        AccessDeniedError,
        AtCapacityError,
        CallTimeoutError,
        ClientError,
        ConnectionLostError,
        EpisodeEndedError,
        NodeLostError,
        NotRunnableError,
        NoVerdictError,
        ProtocolError,
        RequestError,
        SandboxLostError,
        SetUpError,
        UnknownEpisodeError,
        UnknownTaskError,
        UnknownToolError,
    )
    from decathlon_client.client_values import (
        Filters,
        OnProgress,
        Order,
        Policy,
        Reply,
        Task,
        Tool,
        Verdict,
    )
    from decathlon_client.decathlon import Decathlon, ManagedEpisode
    from decathlon_client.lockstep import Call, Lockstep, Slot
    from decathlon_client.opener import OpeningOptions

_MODULES = ("client_values", "client_errors", "batch_results", "decathlon", "attempts", "batch", "lockstep")
"""The modules in which a name is looked up, in this order: the first three do not load `mcp`."""


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            value: object = getattr(_import_module(f"{__name__}.{module}"), name, None)
            if value is not None:
                globals()[name] = value
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "AccessDeniedError",
    "AtCapacityError",
    "Batch",
    "Call",
    "CallTimeoutError",
    "ClientError",
    "ConnectionLostError",
    "Decathlon",
    "Episode",
    "EpisodeEndedError",
    "Fault",
    "Filters",
    "Lockstep",
    "ManagedEpisode",
    "NoVerdictError",
    "NodeLostError",
    "NotRunnableError",
    "OnProgress",
    "OpeningOptions",
    "Order",
    "Player",
    "PlayerFailedError",
    "Policy",
    "ProtocolError",
    "Reply",
    "RequestError",
    "Result",
    "SandboxLostError",
    "SetUpError",
    "Slot",
    "Summary",
    "Tally",
    "Task",
    "TaskSummary",
    "Tool",
    "UnknownEpisodeError",
    "UnknownTaskError",
    "UnknownToolError",
    "Verdict",
]
