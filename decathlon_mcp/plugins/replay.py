"""`replay`: make the calls of a recorded episode again in a new episode, and show different replies."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
from cyclopts import Parameter
from decathlon_client import (
    CallTimeoutError,
    ClientError,
    Decathlon,
    Episode,
    NoVerdictError,
    RequestError,
)
from decathlon_client.process import shutdown_on_signal
from decathlon_client.script import WORKSPACE

from decathlon_mcp.cli.options import (
    ADDRESS,
    PLAY_DEFAULTS,
    Flag,
    PlaySettings,
    names_server,
    run_async,
)
from decathlon_mcp.cli.output import print_json, printed
from decathlon_mcp.cli.usage import check_positive
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.plugins.history.columns import REPLAY_LABEL
from decathlon_mcp.plugins.history.list_episodes import find_row
from decathlon_mcp.plugins.history.repeated_calls import (
    Difference,
    Paths,
    RecordedCall,
    ReplyText,
    changed_in,
    compare_replies,
    recorded_calls,
)
from decathlon_mcp.plugins.play import connect, waiting_for_server
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.lock import check_state_folder
from decathlon_mcp.storage.store import Store
from decathlon_mcp.storage.trajectory import NOTHING, Trajectory
from decathlon_mcp.types import JsonObject, as_object


def replay(
    name: Annotated[str, Parameter(name="EPISODE")],
    /,
    *,
    to: Annotated[int | None, Parameter(metavar="N", validator=check_positive, env_var=())] = None,
    claim: Flag = False,
    stop: Flag = False,
    outside: Flag = False,
    json: Flag = False,
    url: Annotated[str | None, Parameter(group=ADDRESS, metavar="URL")] = None,
    settings: PlaySettings = PLAY_DEFAULTS,
) -> int:
    """Repeat an episode's calls, and show which replies differ.

    Exit status 0 if all are equal, 1 if one differs, 2 if the episode could not be played.

    Parameters
    ----------
    name
        The episode's public id, as `show` lists it, the beginning of its public id, or its handle.
    to
        Only calls 1 to N. [all]
    claim
        Claim the attempt as it was claimed, grade it, and compare the verdicts too.
    stop
        Stop after the first difference.
    outside
        Replay the episode also if its task reaches what episodes share: the network, services, accounts.
    json
        Print one JSON object, with the whole replies that differ.
    url
        Replay on this server; its token is read from `DECATHLON_TOKEN`. [`DECATHLON_URL`, if no suite is
        named; else a server in this process]
    """
    options = ReplayOptions(to=to, claim=claim, stop=stop, outside=outside, as_json=json)
    return run_async(
        partial(replay_episode, embedded=not names_server(url, settings)), settings, name, url, options
    )


EQUAL, DIFFERENT, NOT_PLAYED = 0, 1, 2
"""Exit statuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How an episode is replayed. `to`: the last call, or all. `claim`: claim and grade it too.

    `stop`: after the first difference. `outside`: also if the task reaches what episodes share.
    """

    to: int | None = None
    claim: bool = False
    stop: bool = False
    outside: bool = False
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class _Source:
    """The recorded episode. `head`, `ready`, `claim`: the lines of its trajectory; empty if it has none."""

    public_id: str
    trajectory: Trajectory
    head: JsonObject
    ready: JsonObject
    claim: JsonObject
    verdict: JsonObject | None

    @property
    def launch_time(self) -> str:
        """Raises BadRequestError if it is not known."""
        if not isinstance(time := self.head.get("launch_time"), str):
            raise BadRequestError(f"the launch time of {self.public_id} is not known: its record has none")
        return time

    def word(self, name: str) -> str:
        """A text of the head line; empty if it has none."""
        return str(self.head.get(name) or "")


async def replay_episode(
    settings: Settings, name: str, url: str | None, options: ReplayOptions, *, embedded: bool
) -> int:
    """Replay the episode with this public id, or its beginning, or this handle; returns the exit status.

    It is read from the settings' state folder. `embedded`: in a server in this process; else at `url`.
    """
    try:
        source = await anyio.to_thread.run_sync(_read, settings.state, name)
        same = {key: value for key in ("names", "language") if (value := source.word(key))}
        server = settings.model_copy(update=same) if embedded else None
        d = connect(server, url)
        async with shutdown_on_signal() as watcher, waiting_for_server(server, url):
            return await _Replay(d, source, options).run()
    except (DecathlonError, ClientError) as error:
        sys.stderr.write(f"decathlon-mcp: {' '.join(error.message.split())}\n")
        return NOT_PLAYED
    return watcher.status or NOT_PLAYED


def _read(state: Path, name: str) -> _Source:
    check_state_folder(state)
    with Store.open_read_only(state) as store:
        row = find_row(store, state, name)
    try:
        trajectory = Trajectory(state / "episodes" / row.id).update()
        places = (trajectory.index.placed.get(event, NOTHING) for event in ("start", "ready", "claim"))
        head, ready, claim = (trajectory.line(place) or {} for place in places)
    except OSError as error:
        raise BadRequestError(f"the calls of {row.public_id} cannot be read: {error.strerror}") from None
    return _Source(row.public_id, trajectory, head, ready, claim, row.verdict)


@dataclass(slots=True)
class _Replay:
    d: Decathlon
    source: _Source
    options: ReplayOptions
    calls: list[JsonObject] = field(default_factory=list[JsonObject])
    notes: list[str] = field(default_factory=list[str])
    first: int | None = None
    """The first call whose reply differs."""

    async def run(self) -> int:
        source, verdict = self.source, None
        async with (
            self.d,
            self.d.episode(
                source.word("task"),
                launch_time=source.launch_time,
                labels={REPLAY_LABEL: source.public_id},
                outside=self.options.outside,
            ) as episode,
        ):
            public_id = episode.public_id
            await self._require_the_same(episode)
            self._say(f"{source.word('task')}: replay of {source.public_id} is {public_id}")
            for note in self.notes:
                self._say(note)
            await self._make_calls(episode)
            if self.options.claim and not (self.options.stop and self.first is not None):
                verdict = await self._claim(episode)
        return self._report(public_id, verdict)

    async def _require_the_same(self, episode: Episode) -> None:
        """Raise BadRequestError for what makes a replay senseless, and note what may explain differences."""
        source = self.source
        status = (await self.d.call_lobby("episode_status", {"episode": episode.id})).structured or {}
        for name, what in (("language", "language"), ("names", "spelling of tool names")):
            if (before := source.word(name)) and status.get(name) not in (None, before):
                raise BadRequestError(
                    f"{source.public_id} was played with the {what} {before}, and this server has "
                    f"{status.get(name)}: start one with `--{name} {before}`"
                )
        calls = recorded_calls(source.trajectory, self.options.to)
        names = await anyio.to_thread.run_sync(lambda: {call.name for call in calls})
        if gone := sorted(names - {tool.name for tool in episode.tools}):
            raise BadRequestError(f"the task has no tool {' and no '.join(gone)} any more")
        revision = source.ready.get("suite_revision")
        if status.get("suite_revision") not in (None, revision):
            self.notes.append(f"the suite's revision was {revision}, and is {status.get('suite_revision')}")
        if source.trajectory.index.last and not source.trajectory.index.sent:
            self.notes.append("no call was sent")

    def _paths(self, episode: Episode) -> Paths | None:
        """The workspaces' paths where they differ, as they do without isolation."""
        prompt = as_object(self.source.ready.get("prompt")) or {}
        before = WORKSPACE.search(f"{prompt.get('system')}\n{prompt.get('task')}")
        now = WORKSPACE.search(episode.prompt)
        if before is None or now is None or (paths := Paths.of(before[1], now[1])) is None:
            return None
        self._say(f"{paths.old} was the workspace, and is {paths.new}: calls are sent with the new path")
        return paths

    async def _make_calls(self, episode: Episode) -> None:
        paths, changed = self._paths(episode), set[str]()
        calls = recorded_calls(self.source.trajectory, self.options.to)
        while (call := await anyio.to_thread.run_sync(next, calls, None)) is not None:
            entry: JsonObject = {"call": call.seq, "name": call.name}
            self.calls.append(entry)
            if call.overlaps:
                entry["overlapped"] = True
            if stale := changed_in(call.arguments, changed):
                entry["changed_arguments"] = stale
            if call.missing in ("cancelled", "unanswered"):
                entry["result"] = f"not sent: {call.missing}"
                self._show(entry)
                continue
            now = await _reply_to(episode, call, paths)
            difference = None
            if call.reply is None:
                entry["result"] = "sent: the recorded reply was not kept"
            else:
                difference = await anyio.to_thread.run_sync(compare_replies, call.reply, now, paths)
                entry["result"] = "equal" if difference is None else "differs"
            if difference is not None:
                self.first = self.first or call.seq
                changed |= difference.changed
                entry["difference"] = _difference_json(difference)
            self._show(entry, difference)
            if difference is not None and self.options.stop:
                return

    async def _claim(self, episode: Episode) -> JsonObject:
        """Close the attempt as it was closed, and return the verdict."""
        claim = self.source.claim
        answer = claim.get("answer")
        if claim.get("truncated"):
            await episode.truncate(answer, turns=claim.get("turns"))
        elif claim.get("by_agent"):
            await episode.claim_done(answer)
        try:
            return dict((await episode.evaluate()).raw)
        except NoVerdictError as error:
            if not error.verdict:
                raise
            return dict(error.verdict)

    # what people and programs read

    def _say(self, text: str) -> None:
        if not self.options.as_json:
            sys.stdout.write(f"{printed(text)}\n")

    def _show(self, entry: JsonObject, difference: Difference | None = None) -> None:
        marks = [entry["result"] if difference is None else f"differs: {difference.kind}"]
        if entry.get("overlapped"):
            marks.append("ran at the same time as another call, now in order")
        if stale := entry.get("changed_arguments"):
            marks.append(f"its arguments have {', '.join(stale)}, which is another one now")
        self._say(f"{entry['call']:>5}  {entry['name']}  {'; '.join(marks)}")
        if difference is not None:
            for sign, reply, part in (
                ("-", difference.old, difference.old_part),
                ("+", difference.new, difference.new_part),
            ):
                error = " (error)" if reply.is_error else ""
                self._say(f"       {sign}{error} {_around(reply.text, part)}")

    def _report(self, public_id: str, verdict: JsonObject | None) -> int:
        compared = [call for call in self.calls if call["result"] in ("equal", "differs")]
        different = sum(call["result"] == "differs" for call in compared)
        before = self.source.verdict
        is_graded_alike = verdict is None or before is None or _grade(before) == _grade(verdict)
        if self.options.as_json:
            print_json(
                {
                    "episode": self.source.public_id,
                    "replay": public_id,
                    "task": self.source.word("task"),
                    "notes": self.notes,
                    "calls": self.calls,
                    "equal": len(compared) - different,
                    "different": different,
                    "first_difference": self.first,
                    **({} if verdict is None else {"verdict": verdict, "verdict_before": before}),
                }
            )
        elif self.first is None:
            self._say(f"{len(compared)} of {len(compared)} replies are equal")
        else:
            self._say(
                f"{len(compared) - different} of {len(compared)} replies are equal; "
                f"the first that differs is that of call {self.first}"
            )
        if verdict is not None:
            was = "was not graded" if before is None else f"was {_grade_text(before)}"
            self._say(f"the verdict {was}, and is {_grade_text(verdict)}")
        return EQUAL if self.first is None and is_graded_alike else DIFFERENT


async def _reply_to(episode: Episode, call: RecordedCall, paths: Paths | None) -> ReplyText:
    """Make a call again. Raises ClientError if the episode cannot go on."""
    arguments = call.arguments if paths is None or call.arguments is None else paths.moved(call.arguments)
    try:
        reply = await episode.call(call.name, arguments)
    except (RequestError, CallTimeoutError) as error:
        return ReplyText.of_error(error.message)
    if episode.claimed:
        raise ClientError(f"call {call.seq} could not be made: {reply.text}")
    return ReplyText.of_result(reply.raw)


def _difference_json(difference: Difference) -> JsonObject:
    return {
        "class": difference.kind,
        "old": difference.old.text,
        "new": difference.new.text,
        "old_part": difference.old_part,
        "new_part": difference.new_part,
        "old_is_error": difference.old.is_error,
        "new_is_error": difference.new.is_error,
    }


SHOWN_AROUND = 60
"""Characters before and after a differing part that are shown with it."""


def _around(text: str, part: str) -> str:
    """The differing part of a reply in brackets, with what stands around it."""
    whole = part.removesuffix("…")
    at = text.find(whole)
    before, after = text[max(0, at - SHOWN_AROUND) : at], text[at + len(whole) :][:SHOWN_AROUND]
    shown = f"{'…' if at > SHOWN_AROUND else ''}{before}[{part}]{after}"
    return shown.replace("\r", "").replace("\n", "⏎")


def _grade(verdict: JsonObject) -> tuple[Any, Any, Any]:
    return verdict.get("status"), verdict.get("success"), verdict.get("reward")


def _grade_text(verdict: JsonObject) -> str:
    reward = verdict.get("reward")
    return str(verdict.get("status")) if reward is None else f"reward {reward:g}"
