"""inspect-ai: a task whose samples are the server's tasks, a solver that plays them, a scorer of verdicts.

    inspect eval decathlon_client/tool_decathlon -T url=http://127.0.0.1:8765 --model openai/gpt-5

An attempt without a verdict is an error of its sample (see `--fail-on-error`), never a score. Inspect-ai's
limits on messages and tokens truncate the attempt (see `Episode.truncate`); its time limit cancels it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser, execute_tools, get_model
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ContentImage, ContentText, ToolDef, ToolError, ToolParams
from inspect_ai.util import LimitExceededError

from decathlon_client import sync, values
from decathlon_client.decathlon import Decathlon
from decathlon_client.episode import Episode
from decathlon_client.labels import ATTEMPT
from decathlon_client.notes import sending_notes
from decathlon_client.opener import RETRIES
from decathlon_client.values import Reply, Tool

VERDICT = "decathlon/verdict"


@task
def tool_decathlon(
    url: str | None = None,
    split: str | None = None,
    tasks: str | Sequence[str] | None = None,
    max_calls: int | None = None,
    message_limit: int | None = 300,
    labels: Mapping[str, str] | None = None,
) -> Task:
    """The tasks of a split (default: all), or those whose ids are in `tasks`.

    `labels` are those of the episodes (`-T labels='{run: a}'`). `url` is the server [`DECATHLON_URL`, else
    http://127.0.0.1:8765]; its token is in `DECATHLON_TOKEN`.
    """
    task_ids = [tasks] if isinstance(tasks, str) else tasks
    with sync.Decathlon(url) as d:
        runnable = [task for task in d.tasks(split=split) if task.runnable]
    launch_time = next((task.launch_time for task in runnable), None)
    samples = [
        Sample(id=task.id, input=_input(task), metadata={"splits": list(task.splits)})
        for task in runnable
        if task_ids is None or task.id in task_ids
    ]
    return Task(
        dataset=MemoryDataset(samples, name="tool-decathlon"),
        solver=play(url, launch_time, max_calls, labels),
        scorer=verdict(),
        message_limit=message_limit,
    )


def _input(task: values.Task) -> str:
    # The solver replaces it by the episode's prompt, which is the same unless this one is provisional.
    return task.id if task.prompt is None or task.prompt_is_provisional else task.prompt


@solver
def play(
    url: str | None = None,
    launch_time: str | None = None,
    max_calls: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> Solver:
    """Play an episode of the sample's task and grade it. The sample's metadata has its `page`."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        async with (
            Decathlon(url) as d,
            d.episode(
                str(state.sample_id),
                launch_time=launch_time,
                max_calls=max_calls,
                labels={ATTEMPT: str(state.epoch - 1), **(labels or {})},
                **RETRIES,
            ) as episode,
        ):
            state.metadata["page"] = episode.page
            state.messages = [ChatMessageUser(content=episode.prompt)]
            try:
                await _play_turns(state, episode)
            except LimitExceededError:
                await episode.truncate(turns=sum(message.role == "assistant" for message in state.messages))
                state.store.set(VERDICT, dict((await episode.evaluate()).raw))
                raise
            state.store.set(VERDICT, dict((await episode.evaluate()).raw))
        return state

    return solve


async def _play_turns(state: TaskState, episode: Episode) -> None:
    tools = [_tool(episode, tool) for tool in episode.tools]
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


@scorer(metrics=[mean(), stderr()])
def verdict() -> Scorer:
    """Scores a sample by its reward, with the verdict as metadata."""

    async def score(state: TaskState, target: Target) -> Score:
        raw: dict[str, Any] = state.store.get(VERDICT)
        return Score(value=raw["reward"], explanation=raw.get("evaluator_output"), metadata=raw)

    return score


def _tool(episode: Episode, tool: Tool) -> ToolDef:
    async def call(**arguments: Any) -> str | list[Any]:
        reply = await episode.act(tool.name, arguments)
        if reply.is_error:
            raise ToolError(reply.text)
        return _content(reply)

    schema = {key: tool.input_schema[key] for key in ("properties", "required") if key in tool.input_schema}
    return ToolDef(
        call,
        name=tool.name,
        description=tool.description or tool.name,
        parameters=ToolParams.model_validate(schema),
        max_output=0,
    )


def _content(reply: Reply) -> str | list[Any]:
    images = [
        ContentImage(image=f"data:{part['mimeType']};base64,{part['data']}")
        for part in reply.content
        if part.get("type") == "image"
    ]
    return [ContentText(text=reply.text), *images] if images else reply.text
