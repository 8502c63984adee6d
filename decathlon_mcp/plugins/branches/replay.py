"""Branches: episodes that start where another one stood after one of its calls.

The set-up of a branch makes the calls of the other episode again, one by one, before the branch is ready, and
compares the replies. If a state of the other episode was saved (`saving`), the branch begins as a copy of
the newest one, and only the calls after it are made. The other episode may still play.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import anyio
import anyio.to_thread

from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.call import Outcome
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.tools.session import ToolSession
from decathlon_mcp.errors import (
    BadRequestError,
    DecathlonError,
    EpisodeClaimedError,
    SandboxLostError,
    SetUpError,
    UnknownToolError,
    failure_text,
)
from decathlon_mcp.plugins.branches import Branch, BranchOptions, note_branch
from decathlon_mcp.plugins.history.replies import (
    Difference,
    Paths,
    RecordedCall,
    ReplyText,
    compare_replies,
    raw_members,
    recorded_calls,
    why_missing,
)
from decathlon_mcp.storage.trajectory import RequestKeys, Trajectory
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

_OF_ONE_EPISODE = frozenset({"event", "time", "replayed", "request", *RequestKeys.__struct_fields__})
"""Members of a call's lines that its copy in another episode does not have, such as the requests by which
clients know it."""
TIMES_SLOWER = 3
"""The calls may take so many times as long as the first time, in addition to the time limit of a set-up."""


def shared_with_others(factory: SandboxFactory, task: Task) -> list[str]:
    """What a task reaches that episodes share, because no set-up makes it for one of them.

    The network, unless its recording answers; services of which there is one for all; accounts, and
    whatever else tasks must not use at the same time.
    """
    web = factory.web
    is_outbound = factory.network_for(task) == "outbound" or (
        web is not None and web.reaches_sites and factory.uses_web(task)
    )
    services = factory.suite.services(task)
    return [
        *(["the network"] if is_outbound else []),
        *(f"the service {name}" for name, service in services.items() if service.image is None),
        *(resource.name for resource in factory.suite.shared_resources(task.id)),
    ]


def refuse_shared(factory: SandboxFactory, task: Task, task_name: str) -> None:
    """Raise BadRequestError for a task whose calls must not be made again without asking."""
    if shared := shared_with_others(factory, task):
        raise BadRequestError(
            f"the calls of {task_name} reach {', '.join(shared)}, which episodes share: made again they can "
            "change what others see, and have other replies; `outside` set to true allows it"
        )


async def check_source(source: Path, at: int, readers: anyio.CapacityLimiter) -> None:
    """Check that an episode can be branched from after call `at`. Raises BadRequestError.

    `source`: its folder. `readers`: limits how many trajectories are read at once, before the branch has a
    place in the queue.
    """

    def check() -> None:
        try:
            require_state_after(Trajectory(source).update(), at)
        except OSError as error:
            raise BadRequestError(f"the calls of this episode cannot be read: {error.strerror}") from None

    await anyio.to_thread.run_sync(check, limiter=readers)


def require_state_after(trajectory: Trajectory, last: int) -> None:
    """Check that the episode stood still after this call, in a state to which its calls lead.

    Raises BadRequestError, OSError.
    """
    index = trajectory.index
    if last > index.last:
        raise BadRequestError(
            f"there is no call {last} to branch after: the episode has {index.last} until now"
        )
    refused, claim = f"no branch after call {last}: call", index.placed.get("claim", math.inf)
    sent = trajectory.sent_calls()
    following = min((call_at for seq, call_at, _ in sent.places() if seq > last), default=math.inf)
    for call in sent:
        if call.seq > last:
            return
        if (missing := why_missing(call.reply)) is not None:
            why = "was cancelled" if missing == "cancelled" else "has no reply that could be compared"
            raise BadRequestError(f"{refused} {call.seq} {why}; branch before it")
        if call.reply_at > claim:
            raise BadRequestError(f"{refused} {call.seq} ended after the claim")
        if call.reply_at > following:
            raise BadRequestError(
                f"{refused} {call.seq} still ran when a later one was sent; branch after a call at whose end "
                "no other ran"
            )


async def play_again(
    episode: Episode, branch: Branch, session: ToolSession, source: Path | None, *, copied: int = 0
) -> None:
    """Make the calls of the episode that this one branches from, before this one is ready.

    `source`: its folder. `copied`: the call after which its sandbox was copied; that one and those before
    are not made, but written with their replies. Raises SetUpError for a reply that differs, if the branch
    refuses that, and for calls that cannot be made or take too long; SandboxLostError.
    """
    if source is None:
        raise _gone(branch)
    try:
        recorded = await anyio.to_thread.run_sync(Trajectory(source).update)
        pairs = (raw_members(call) for call in recorded.sent_calls() if call.reply)
        while (pair := await anyio.to_thread.run_sync(next, pairs, None)) is not None:
            if pair[0]["seq"] > copied:
                break
            _copy(episode, branch, *pair)
        calls = (call for call in recorded_calls(recorded, branch.at) if call.seq > copied)
        times = (seconds for seconds in recorded.index.seconds[: branch.at] if not math.isnan(seconds))
        seconds = episode.spec.limits.set_up_seconds + TIMES_SLOWER * sum(times)
        with anyio.move_on_after(seconds) as time_limit:
            while (call := await anyio.to_thread.run_sync(next, calls, None)) is not None:
                await _play_call(episode, branch, session, call)
    except OSError:
        raise _gone(branch) from None
    if time_limit.cancelled_caught:
        raise SetUpError(f"calls 1 to {branch.at} of {branch.episode} took longer than {seconds:.0f} s")


def _copy(episode: Episode, branch: Branch, *lines: JsonObject) -> None:
    """Write a call from both lines that it has in the other episode, of whose state this one is a copy.

    Members of the lines may be `msgspec.Raw`, except for `seq`, `server`, `tool`, `failed` and `seconds`.
    Raises SetUpError if the trajectory has no room.
    """
    call, reply = ({key: line[key] for key in line if key not in _OF_ONE_EPISODE} for line in lines)
    add = episode.trajectory.add
    if not (add("call", **call, replayed=True, request=0) and add("reply", **reply)):
        raise SetUpError(
            f"call {call['seq']} of {branch.episode} does not fit: the log has reached its limit, or the "
            "server's disk is nearly full"
        )


async def _play_call(episode: Episode, branch: Branch, session: ToolSession, call: RecordedCall) -> None:
    paths = _paths(episode, branch)
    arguments = call.arguments if paths is None or call.arguments is None else paths.moved(call.arguments)
    try:
        outcome = await episode.calls.replay(
            session, call.seq, call.name, CallParams.of(arguments, call.meta)
        )
    except (UnknownToolError, EpisodeClaimedError) as error:
        raise SetUpError(
            f"call {call.seq} of {branch.episode} cannot be made again: {error.message}"
        ) from None
    if isinstance(outcome, SandboxLostError):
        raise outcome
    difference = await anyio.to_thread.run_sync(_compare, call, outcome, paths)
    if difference is None:
        return
    if BranchOptions.of(episode.spec).on_difference == "refuse":
        raise SetUpError(
            f"call {call.seq} ({call.name}) of {branch.episode} has another reply now: {difference}; with "
            '`on_difference` "report" the branch goes on',
            call=call.seq,
            difference=difference.to_json(),
        )
    episode.trajectory.add("difference", seq=call.seq, **difference.to_json())
    note_branch(episode, differences=note_branch(episode)["differences"] + 1)


def _compare(call: RecordedCall, outcome: Outcome, paths: Paths | None) -> Difference | None:
    if call.reply is None:
        return None  # `check_source` has refused it
    return compare_replies(call.reply, _text_of(outcome), paths)


def _text_of(outcome: Outcome) -> ReplyText:
    if isinstance(outcome, DecathlonError):
        return ReplyText.of_error(failure_text(outcome))
    if outcome.result is None:
        return ReplyText.of_error(str((outcome.error or {}).get("message")))
    return ReplyText.of_result(json.loads(outcome.result))


def _paths(episode: Episode, branch: Branch) -> Paths | None:
    # Without isolation each sandbox has a folder of its own, which arguments name.
    root = episode.sandbox_factory.agent_root
    return Paths.of(str(root(branch.episode)), str(root(episode.public_id)))


def _gone(branch: Branch) -> SetUpError:
    return SetUpError(f"the record of episode {branch.episode}, from which this one branches, is gone")
