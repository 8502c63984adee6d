"""TRL: an environment per task for `GRPOTrainer(environment_factory=..., reward_funcs=...)`.

The reward is None if there is no verdict; TRL leaves such a rollout out.
"""

# TRL takes an environment's tools from the methods of its class, so every set of tools has a generated class.
# It resets environments one after the other, so `reset` only starts opening an episode and the first tool
# call waits for it. The reward is a function of all environments and not their `get_reward`: TRL would call
# that one after the other and make a column for each class; the function grades them in parallel.

from __future__ import annotations

import atexit
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from decathlon_client.client_errors import ClientError
from decathlon_client.client_values import Tool, playable
from decathlon_client.notes import send_notes
from decathlon_client.opener import RETRIES
from decathlon_client.sync import Decathlon, Episode

TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


@dataclass(frozen=True)
class Environments:
    """What a `GRPOTrainer` needs.

    `rows` is the data set for `datasets.Dataset.from_list`, `factories` the `environment_factory`, `reward`
    one of the `reward_funcs`.
    """

    rows: list[dict[str, Any]]
    factories: dict[str, Callable[[], ToolDecathlonEnvironment]]
    reward: Callable[..., list[float | None]]


def environments(
    url: str | None = None,
    split: str | None = None,
    *,
    token: str | None = None,
    tasks: list[str] | None = None,
    max_calls: int | None = None,
    concurrency: int = 64,
    labels: Mapping[str, str] | None = None,
) -> Environments:
    """Environments for the tasks of a split (default: all), or for the tasks whose ids are in `tasks`.

    `url` and `token` are as for `Decathlon`; `labels` are the labels of the episodes. Opens one episode for
    each distinct set of servers, to list its tools. The connection is closed when the program ends. Raises
    ValueError for tasks that cannot be played.
    """
    stack = ExitStack()
    atexit.register(stack.close)
    d = stack.enter_context(Decathlon(url, token))
    opener = stack.enter_context(ThreadPoolExecutor(concurrency, "tool-decathlon"))
    selected = playable(d.tasks(split=split), tasks)
    classes: dict[object, type[ToolDecathlonEnvironment]] = {}
    factories: dict[str, Callable[[], ToolDecathlonEnvironment]] = {}
    for task in selected:
        servers = (task.suite, task.servers, task.local_tools)
        if servers not in classes:
            classes[servers] = _environment_class(d.tools(task))
        factories[task.id] = partial(
            classes[servers], d, opener, max_calls, task.prompt_is_provisional, labels
        )

    def reward(
        environments: Sequence[ToolDecathlonEnvironment], completions: Sequence[Any] = (), **row: Any
    ) -> list[float | None]:
        conversations = [completion if isinstance(completion, list) else [] for completion in completions]
        conversations += [[]] * (len(environments) - len(conversations))
        return list(opener.map(ToolDecathlonEnvironment._reward, environments, conversations))

    rows = [
        {
            "environment": task.id,
            "task": task.id,
            "launch_time": task.launch_time,
            "prompt": [{"role": "user", "content": "" if task.prompt_is_provisional else task.prompt}],
        }
        for task in selected
    ]
    return Environments(rows, factories, reward)


class ToolDecathlonEnvironment:
    """Plays one episode after another. Its public methods are the tools."""

    def __init__(
        self,
        decathlon: Decathlon,
        opener: ThreadPoolExecutor,
        max_calls: int | None,
        returns_prompt: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._decathlon, self._opener = decathlon, opener
        self._max_calls = max_calls
        self._returns_prompt = returns_prompt
        self._labels = labels
        self._stack = ExitStack()
        self._opening: Future[Episode] | None = None

    def reset(self, *, task: str, launch_time: str | None = None, **row: Any) -> str | None:
        self._close()
        self._stack = ExitStack()
        self._opening = self._opener.submit(self._open, self._stack, task, launch_time)
        # TRL adds it to the row's message. Waits for the sandbox, so only where the row has no prompt.
        return self._episode().prompt if self._returns_prompt else None

    def _reward(self, conversation: Sequence[Mapping[str, Any]]) -> float | None:
        try:
            episode = self._episode()
            # The model's texts are known only now.
            send_notes(episode, conversation)
            return episode.evaluate().reward
        except ClientError:
            return None
        finally:
            self._close()

    def _open(self, stack: ExitStack, task: str, launch_time: str | None) -> Episode:
        opening = self._decathlon.episode(
            task, launch_time=launch_time, max_calls=self._max_calls, labels=self._labels, **RETRIES
        )
        return stack.enter_context(opening)

    def _episode(self) -> Episode:
        assert self._opening is not None, "the environment was not reset"
        return self._opening.result()

    def _close(self) -> None:
        if self._opening is not None:
            self._opening.exception()
            self._opening = None
            self._stack.close()


def _environment_class(tools: tuple[Tool, ...]) -> type[ToolDecathlonEnvironment]:
    methods = {tool.name: _method(tool) for tool in tools}
    return type("ToolDecathlonEnvironment", (ToolDecathlonEnvironment,), methods)


def _method(tool: Tool) -> Callable[..., str]:
    """A method whose name, signature and docstring TRL turns back into the tool's schema."""

    def call(self: ToolDecathlonEnvironment, **arguments: Any) -> str:
        present = {name: value for name, value in arguments.items() if value is not None}
        return self._episode().act(tool.name, present).text

    properties: dict[str, dict[str, Any]] = tool.input_schema.get("properties") or {}
    required = tool.input_schema.get("required") or []
    names = sorted(properties, key=lambda name: name not in required)
    call.__name__ = call.__qualname__ = tool.name
    call.__annotations__ = {name: _type(properties[name], name in required) for name in names} | {
        "return": str
    }
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(
                inspect.Parameter(
                    name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty if name in required else None,
                    annotation=call.__annotations__[name],
                )
                for name in names
            ),
        ],
        return_annotation=str,
    )
    descriptions = [
        f"    {name}: {' '.join(str(properties[name].get('description', name)).split())}" for name in names
    ]
    call.__doc__ = "\n".join(
        [" ".join(tool.description.split()) or tool.name, "", "Args:", *descriptions]
        if descriptions
        else [tool.description or tool.name]
    )
    return call


def _type(schema: dict[str, Any], is_required: bool) -> Any:
    name = schema.get("type")
    python_type: Any = TYPES.get(name, str) if isinstance(name, str) else Any
    return python_type if is_required or python_type is Any else python_type | None
