"""Play and train on Toolathlon's tasks through a decathlon-mcp server.

async with Decathlon("http://127.0.0.1:8765") as d:
    async with d.episode("find-rate-regression") as e:
        ...  # show e.prompt and e.tools to a model
        reply = await e.call("files__read_file", {"path": "complaint.md"})
        await e.claim_done("It was the commit of 18 February.")
        verdict = await e.evaluate()
        print(verdict.reward)
"""

from decathlon_client.batch import Batch, Player
from decathlon_client.decathlon import Decathlon
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
from decathlon_client.managed import ManagedEpisode
from decathlon_client.opener import OpeningOptions
from decathlon_client.progress import Tally
from decathlon_client.results import Fault, Result, Summary, TaskSummary
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
