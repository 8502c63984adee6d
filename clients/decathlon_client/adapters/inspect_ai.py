"""inspect-ai: a task whose samples are the server's tasks, a solver that plays them, and scorers of verdicts.

    inspect eval decathlon_client/tool_decathlon -T url=http://127.0.0.1:8765 --model openai/gpt-5

The task's setup opens a sample's episode, a solver plays it, and the scorers read its verdict; its cleanup
closes the episode, also if the sample was cancelled. An attempt that one of inspect-ai's limits ended is
truncated (see `Episode.truncate`) and graded. An attempt without a verdict is *lost*: an error of its sample,
whose scores are NaN, never 0.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import anyio
from inspect_ai import Task, task
from inspect_ai.agent import Agent, as_solver
from inspect_ai.agent import react as _react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.event import ErrorEvent, SampleLimitEvent
from inspect_ai.log import transcript

# Not public in 0.3.285: which evaluation a sample belongs to, and how an operator interrupted it.
from inspect_ai.log._samples import sample_active
from inspect_ai.model import ChatMessageUser, execute_tools, get_model
from inspect_ai.scorer import Metric, SampleScore, Score, Scorer, Target, metric, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ContentImage, ContentText, ToolDef, ToolError, ToolParams
from inspect_ai.util import LimitExceededError, registry_create, sample_limits

from decathlon_client import ManagedEpisode, client_values, sync
from decathlon_client.batch import run_name
from decathlon_client.client_episode import Episode
from decathlon_client.client_errors import ClientError
from decathlon_client.client_values import ATTEMPT, RUN, Reply, Tool
from decathlon_client.notes import sending_notes

EVAL, MODEL = "eval", "model"
"""Labels of the episodes besides `run` and `attempt`: the evaluation's id, and the model's name."""
UNSCORED = float("nan")
LOST_SHARE = 0.1
"""Share of lost samples from which an evaluation counts as failed; it is played to its end all the same."""
_KEPT_ARGUMENTS = ("__registry_params__", "__task_all_params__")
"""Attributes in which inspect-ai 0.3.285 keeps the arguments of a task for its log."""

log = logging.getLogger("decathlon.client")


class _Evaluation(Task):
    """A task whose log has the arguments that were chosen when it was made, for `inspect eval-retry`."""

    chosen: Mapping[str, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, {**value, **self.chosen} if name in _KEPT_ARGUMENTS else value)


@task
def tool_decathlon(
    url: str | None = None,
    split: str | None = None,
    tasks: str | Sequence[str] | None = None,
    missing: str = "error",
    agent: str | None = None,
    max_calls: int | None = None,
    message_limit: int | None = 300,
    labels: Mapping[str, str] | None = None,
    run: str | None = None,
    launch_time: date | str | None = None,
) -> Task:
    """The tasks of a split (default: all), or the tasks whose ids are in `tasks`.

    `url` is the server [`DECATHLON_URL`, else http://127.0.0.1:8765]; its token is in `DECATHLON_TOKEN`.
    `missing`: what becomes of tasks that do not exist, or cannot run on the server: `error`, or `skip`, which
    logs their number. `agent`: an agent of inspect-ai by its registered name, such as `react`, that gets the
    episode's tools; by default a plain loop. `labels`: labels of the episodes (`-T labels='{team: a}'`).
    `run`, the label under which the server shows them, and `launch_time` are chosen once and kept in the log,
    so that `inspect eval-retry` continues the same run.

    Raises ValueError for tasks that are missing, and for wrong arguments.
    """
    if missing not in ("error", "skip"):
        raise ValueError(f"missing: `error` or `skip` was expected, not {missing!r}")
    with sync.Decathlon(url) as d:
        offered = {task.id: task for task in d.tasks(split=split)}
    ids = list(offered) if tasks is None else [tasks] if isinstance(tasks, str) else list(tasks)
    chosen = [offered[name] for name in ids if name in offered and offered[name].runnable]
    skipped = _refuse_missing(ids, offered, split, skip=missing == "skip")
    if not chosen:
        raise ValueError("none of the tasks can be played on this server")
    if isinstance(launch_time, date):
        launch_time = launch_time.isoformat()  # the command line reads YAML, which has dates
    launch_time = launch_time or chosen[0].launch_time
    run = run or run_name(None, labels or {})
    evaluation = _Evaluation(
        dataset=MemoryDataset([_sample(task) for task in chosen], name="tool-decathlon"),
        setup=open_episode(url, launch_time, max_calls, {RUN: run, **(labels or {})}),
        solver=play(agent),
        scorer=[reward(), success(), success_of_all(), lost()],
        cleanup=close_episode,
        message_limit=message_limit,
        fail_on_error=LOST_SHARE,
        continue_on_fail=True,
        score_on_error=True,
        metadata={"skipped_tasks": skipped} if skipped else None,
    )
    evaluation.chosen = {"run": run, "launch_time": launch_time}
    return evaluation


def _refuse_missing(
    ids: Sequence[str], offered: Mapping[str, client_values.Task], split: str | None, *, skip: bool
) -> list[str]:
    """The tasks that cannot be played. Raises ValueError unless they are skipped."""
    reasons = {name: "there is no such task" for name in ids if name not in offered}
    if split is not None:
        reasons = dict.fromkeys(reasons, f"there is no such task in split {split!r}")
    for name in ids:
        if name in offered and not offered[name].runnable:
            reasons[name] = "; ".join(offered[name].missing)
    if not reasons:
        return []
    if not skip:
        text = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
        raise ValueError(
            f"{len(reasons)} of {len(ids)} tasks cannot be played: {text}. `-T missing=skip` leaves them out"
        )
    log.warning("%d of %d tasks are skipped: %s", len(reasons), len(ids), ", ".join(reasons))
    return list(reasons)


def _sample(task: client_values.Task) -> Sample:
    needs = [*task.servers, *task.local_tools, *(["network"] if task.network else [])]
    return Sample(
        id=task.id,
        # The setup replaces it by the episode's prompt, which is the same unless the prompt here is
        # provisional.
        input=task.id if task.prompt is None or task.prompt_is_provisional else task.prompt,
        metadata={"suite": task.suite, "splits": list(task.splits), "needs": needs},
    )


@dataclass(slots=True)
class _Attempt:
    """The episode of a sample. `verdict`: once it was graded; `problem`: why it could not be."""

    managed: ManagedEpisode
    verdict: dict[str, Any] | None = None
    problem: str | None = None
    grading: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def episode(self) -> Episode:
        return self.managed.episode

    async def grade(self, state: TaskState, *, truncated: bool) -> None:
        """Grade it once, whatever is cancelled meanwhile. Raises ClientError if there is no verdict."""
        with anyio.CancelScope(shield=True):
            async with self.grading:
                if self.verdict is not None or self.problem is not None:
                    return
                try:
                    if truncated and not self.episode.claimed:
                        turns = sum(message.role == "assistant" for message in state.messages)
                        await self.episode.truncate(turns=turns)
                    self.verdict = dict((await self.episode.evaluate()).raw)
                except ClientError as error:
                    self.problem = error.message
                    raise
        state.metadata["suite_revision"] = self.verdict.get("suite_revision")


_attempts: dict[str, _Attempt] = {}
"""The open episodes by the `uuid` of their samples. Neither the log nor the store may have their handles."""


def _attempt(state: TaskState) -> _Attempt:
    attempt = _attempts.get(state.uuid)
    if attempt is None:
        raise RuntimeError("the sample has no episode: use `open_episode` as the task's setup")
    return attempt


@solver
def open_episode(
    url: str | None = None,
    launch_time: str | None = None,
    max_calls: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> Solver:
    """Open an episode of the sample's task; for a task's `setup`, with `close_episode` as its `cleanup`.

    The state gets the episode's prompt and tools. The sample's metadata gets its public id as `episode`, its
    `page`, and its `labels`.
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        active = sample_active()
        own = {ATTEMPT: str(state.epoch), MODEL: str(state.model)}
        if active is not None:
            own[EVAL] = active.eval_id
        all_labels = {**own, **(labels or {})}
        try:
            managed = await ManagedEpisode.open(
                str(state.sample_id), url=url, launch_time=launch_time, max_calls=max_calls, labels=all_labels
            )
        except ClientError as error:
            state.metadata |= {"episode": error.episode, "page": error.page, "labels": all_labels}
            raise
        _attempts[state.uuid] = _Attempt(managed)
        episode = managed.episode
        state.metadata |= {"episode": episode.public_id, "page": episode.page, "labels": all_labels}
        state.messages = [ChatMessageUser(content=episode.prompt)]
        state.tools = [tool.as_tool() for tool in _tools(episode)]
        return state

    return solve


async def close_episode(state: TaskState) -> None:
    """Close the sample's episode; for a task's `cleanup`."""
    attempt = _attempts.pop(state.uuid, None)
    if attempt is not None:
        await attempt.managed.close()


@solver
def play(agent: str | None = None) -> Solver:
    """Play the sample's episode and grade it, also after a limit.

    `agent`: a registered agent with a parameter `tools`. By default the model calls tools until it claims the
    task or calls none.
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        attempt = _attempt(state)
        try:
            if agent is None:
                await _play_turns(state, attempt.episode)
            else:
                state = await as_solver(_agent(agent, _tools(attempt.episode)))(state, generate)
        except LimitExceededError:
            await attempt.grade(state, truncated=True)
            raise
        except anyio.get_cancelled_exc_class():
            # Its limits on time cancel a sample, and so does an operator who has it scored early.
            if _is_at_time_limit():
                await attempt.grade(state, truncated=True)
            raise
        await attempt.grade(state, truncated=False)
        return state

    return solve


def _is_at_time_limit() -> bool:
    active = sample_active()
    if active is not None and active.interrupt_action == "score":
        return True
    limits = sample_limits()
    return any(
        limit.remaining is not None and limit.remaining <= 0 for limit in (limits.time, limits.working)
    )


async def _play_turns(state: TaskState, episode: Episode) -> None:
    tools = _tools(episode)
    async with sending_notes(episode) as notes:
        while not episode.claimed:
            state.output = await get_model().generate(state.messages, tools)
            state.messages.append(state.output.message)
            counts = state.output.usage
            usage = counts and {"input_tokens": counts.input_tokens, "output_tokens": counts.output_tokens}
            notes.add(state.output.message.text, usage=usage)
            if not state.output.message.tool_calls:
                return
            messages, output = await execute_tools(state.messages, tools)
            state.messages.extend(messages)
            state.output = output or state.output


def _agent(name: str, tools: Sequence[ToolDef]) -> Agent:
    """An agent of inspect-ai that has these tools. Raises ValueError if it cannot have any."""
    if name == "react":
        # It ends when the model calls no tool: `claim_done` is the way to submit here.
        return _react(tools=tools, submit=False)
    try:
        return registry_create("agent", name, tools=tools)
    except LookupError:
        raise ValueError(f"agent: there is no agent {name!r} in inspect-ai's registry") from None
    except TypeError as error:
        raise ValueError(f"agent: {name} does not take `tools`: {error}") from None


def _lost_reason(state: TaskState) -> str | None:
    """Why the sample has no verdict, once it has been played and graded; None if it has one."""
    attempt = _attempts.get(state.uuid)
    if attempt is not None and attempt.verdict is not None:
        return None
    if attempt is not None and attempt.problem is not None:
        return attempt.problem
    errors = [event.error.message for event in transcript().events if isinstance(event, ErrorEvent)]
    return errors[-1] if errors else "the episode was not graded"


async def _verdict(state: TaskState) -> dict[str, Any] | None:
    """The verdict; None for a lost attempt. Grades the episode if a solver other than `play` did not."""
    attempt = _attempts.get(state.uuid)
    if attempt is None:
        return None
    has_failed = any(isinstance(event, ErrorEvent) for event in transcript().events)
    if not has_failed and attempt.verdict is None:
        was_limited = any(isinstance(event, SampleLimitEvent) for event in transcript().events)
        try:
            await attempt.grade(state, truncated=was_limited)
        except ClientError as error:
            log.warning("Episode %s is lost: %s", attempt.episode.public_id, error.message)
    return attempt.verdict


@metric(name="mean", scores="unreduced")
def mean_of_epochs() -> Metric:
    """The mean over all epochs of all samples."""

    def mean(scores: list[SampleScore]) -> float:
        return _mean([score.score.as_float() for score in scores])

    return mean


@metric(name="stderr", scores="unreduced")
def stderr_of_samples() -> Metric:
    """The standard error of the mean over samples, each by the mean of its epochs; 0 for a single sample."""

    def stderr(scores: list[SampleScore]) -> float:
        by_sample: dict[Any, list[float]] = {}
        for score in scores:
            by_sample.setdefault(score.sample_id, []).append(score.score.as_float())
        means = [_mean(values) for values in by_sample.values()]
        count, mean = len(means), _mean(means)
        if count < 2:
            return 0.0
        return (sum((value - mean) ** 2 for value in means) / (count - 1) / count) ** 0.5

    return stderr


@metric(name="count", scores="unreduced")
def count_of_epochs() -> Metric:
    """How many epochs of all samples have the score 1."""

    def count(scores: list[SampleScore]) -> float:
        return sum(score.score.as_float() for score in scores)

    return count


@metric(name="mean")
def mean_of_samples() -> Metric:
    """The mean over samples, of what the epochs' reducer made of each."""

    def mean(scores: list[SampleScore]) -> float:
        return _mean([score.score.as_float() for score in scores])

    return mean


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


# Without reducers: they would compare it with 1, which only `success` is meant for.
@scorer(metrics=[mean_of_epochs(), stderr_of_samples()])
def reward() -> Scorer:
    """Scores a sample by its reward, with the verdict as metadata; NaN for a lost episode."""

    async def score(state: TaskState, target: Target) -> Score:
        raw = await _verdict(state)
        if raw is None:
            return _unscored(state)
        return Score(value=float(raw["reward"]), explanation=raw.get("evaluator_output"), metadata=raw)

    return score


@scorer(metrics=[mean_of_samples(), stderr_of_samples()])
def success() -> Scorer:
    """1 if the evaluator was content, else 0; NaN if lost. `pass_at_3` and `pass_k_3` are of this."""

    async def score(state: TaskState, target: Target) -> Score:
        raw = await _verdict(state)
        return _unscored(state) if raw is None else Score(value=float(bool(raw["success"])))

    return score


@scorer(metrics=[mean_of_epochs(), stderr_of_samples()])
def success_of_all() -> Scorer:
    """As `success`, but a lost epoch is no success: its mean cannot grow by losing samples."""

    async def score(state: TaskState, target: Target) -> Score:
        raw = await _verdict(state)
        return Score(value=float(raw is not None and bool(raw["success"])))

    return score


@scorer(metrics=[count_of_epochs()])
def lost() -> Scorer:
    """1 for a lost epoch, with the reason, else 0."""

    async def score(state: TaskState, target: Target) -> Score:
        raw = await _verdict(state)
        if raw is not None:
            return Score(value=0.0)
        return Score(value=1.0, explanation=_lost_reason(state), metadata=_lost_metadata(state))

    return score


def _unscored(state: TaskState) -> Score:
    return Score(value=UNSCORED, explanation=_lost_reason(state), metadata=_lost_metadata(state))


def _lost_metadata(state: TaskState) -> dict[str, Any]:
    return {"reason": _lost_reason(state), "episode": state.metadata.get("episode")}


class EpisodeTools:
    """A source of the sample's tools, for agents of your own: `react(tools=[EpisodeTools()])`."""

    async def tools(self) -> list[Any]:
        from inspect_ai.solver._task_state import sample_state

        state = sample_state()
        return [] if state is None else [tool.as_tool() for tool in _tools(_attempt(state).episode)]


def _tools(episode: Episode) -> list[ToolDef]:
    return [_tool(episode, tool) for tool in episode.tools]


def _tool(episode: Episode, tool: Tool) -> ToolDef:
    async def call(**arguments: Any) -> str | list[Any]:
        reply = await episode.act(tool.name, arguments)
        if reply.is_error:
            raise ToolError(reply.text)
        return _content(reply)

    schema = {key: tool.input_schema[key] for key in ("properties", "required") if key in tool.input_schema}
    parameters = ToolParams.model_validate(schema)
    for name, parameter in parameters.properties.items():
        # Agents that are given tools refuse a parameter without one.
        parameter.description = parameter.description or name
    return ToolDef(
        call,
        name=tool.name,
        description=tool.description or tool.name,
        parameters=parameters,
        max_output=0,
    )


def _content(reply: Reply) -> str | list[Any]:
    images = [
        ContentImage(image=f"data:{part['mimeType']};base64,{part['data']}")
        for part in reply.content
        if part.get("type") == "image"
    ]
    return [ContentText(text=reply.text), *images] if images else reply.text
