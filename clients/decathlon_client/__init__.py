"""Play and train on Toolathlon's tasks through a decathlon-mcp server.

async with Decathlon("http://127.0.0.1:8765") as d:
    async with d.episode("find-rate-regression") as e:
        ...  # show e.prompt and e.tools to a model
        reply = await e.call("files__read_file", {"path": "complaint.md"})
        await e.claim_done("It was the commit of 18 February.")
        verdict = await e.evaluate()
        print(verdict.reward)

Names are loaded when they are first used: who needs only a part, such as `decathlon_client.values`, does not
load `mcp`.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from decathlon_client.attempts import Player, PlayerFailedError
    from decathlon_client.batch import Batch
    from decathlon_client.decathlon import Decathlon, ManagedEpisode
    from decathlon_client.episode import Episode
    from decathlon_client.errors import (
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
    from decathlon_client.lockstep import Call, Lockstep, Slot
    from decathlon_client.opener import OpeningOptions
    from decathlon_client.results import Fault, Result, Summary, Tally, TaskSummary
    from decathlon_client.values import (
        Filters,
        OnProgress,
        Order,
        Policy,
        Reply,
        Task,
        Tool,
        Verdict,
    )

_NAMES = {
    "attempts": ("Player", "PlayerFailedError"),
    "batch": ("Batch",),
    "decathlon": ("Decathlon", "ManagedEpisode"),
    "episode": ("Episode",),
    "errors": (
        "AccessDeniedError",
        "AtCapacityError",
        "CallTimeoutError",
        "ClientError",
        "ConnectionLostError",
        "EpisodeEndedError",
        "NodeLostError",
        "NotRunnableError",
        "NoVerdictError",
        "ProtocolError",
        "RequestError",
        "SandboxLostError",
        "SetUpError",
        "UnknownEpisodeError",
        "UnknownTaskError",
        "UnknownToolError",
    ),
    "lockstep": ("Call", "Lockstep", "Slot"),
    "opener": ("OpeningOptions",),
    "results": ("Fault", "Result", "Summary", "Tally", "TaskSummary"),
    "values": ("Filters", "OnProgress", "Order", "Policy", "Reply", "Task", "Tool", "Verdict"),
}
"""The names of this package by the module that has them."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if (module := _MODULES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


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
