"""verifiers 0.4 and later (`verifiers.v1`): `VerifiersEnv`.

The task's `setup` hook opens the episode, the harness makes the tool calls, `finalize` grades the attempt and
closes the episode, and the rewards are read from the verdict. Without a verdict the rollout fails: verifiers
records an error and no reward.

The default harness runs the model's loop in this process, recorded by verifiers' interception. Every other
harness that supports MCP gets the episode's address for its agent as a tool server (`Task.toolsets`), where
`evaluate` does not exist; verifiers refuses a harness without MCP.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import anyio.to_thread

try:
    import verifiers.v1 as vf
    from openai import APIStatusError, AsyncOpenAI
    from pydantic import Field, PrivateAttr
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"load_environment needs verifiers, and there is no module {error.name}; "
        "in the clone: pip install '.[verifiers]'",
        name=error.name,
    ) from None

from decathlon_client import ManagedEpisode, sync
from decathlon_client.client_values import TOKEN_VARIABLE, URL_VARIABLE, check_weights, playable
from decathlon_client.local_server import server_of_this_process
from decathlon_client.notes import sending_notes

ID = "tool-decathlon"
"""The id by which verifiers finds the package `tool_decathlon`."""


SERVER_NAME = "toolathlon"
"""Name of the tool server for other harnesses; most of them begin the names of its tools with it."""
UNOPENED = "http://episode.invalid/mcp"
"""The address before there is an episode: verifiers looks at a task's tool servers before it sets it up."""

# verifiers calls `Task.toolsets` with the task's configuration only, and rollouts of a group share the task.
# `setup` and `toolsets` of a rollout run one after the other in one asyncio task: they share a context.
_agent_address: ContextVar[str] = ContextVar("agent_address", default=UNOPENED)


class EpisodeToolset(vf.Toolset[vf.ToolsetConfig]):
    """The tools of an episode, at the address that its configuration has as `url`."""

    TOOL_PREFIX = SERVER_NAME


class ToolDecathlonTaskConfig(vf.TaskConfig):
    """The server, the limits of an episode, and the rewards."""

    url: str | None = None
    """The server. [`DECATHLON_URL`, else a server that runs as long as this process]"""
    server: str | None = None
    """Without a URL: the program `decathlon-mcp`, perhaps of another environment. [the one installed here]"""
    suite: str = "starter"
    """Without a URL: the suite that is served, a Toolathlon checkout or the bundled one."""
    token_var: str = TOKEN_VARIABLE
    """The environment variable with the server's token, if it requires one."""
    max_calls: int | None = None
    """Limit on the tool calls of an episode."""
    tries: int = 3
    """How often opening an episode is tried before its failure counts."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the episodes."""
    rubric: dict[str, float] = Field(default_factory=dict)
    """Weights of the verdict's metrics, each recorded as a reward; 0 for a task without the metric.
    Empty: the reward is the verdict's."""

    @property
    def token(self) -> str:
        return os.environ.get(self.token_var, "")

    def server_url(self) -> str:
        """The address of the server, which is started if none is named. Raises ClientError."""
        named = self.url or os.environ.get(URL_VARIABLE)
        return named or server_of_this_process(self.server, (self.suite,))


class ToolDecathlonConfig(vf.TasksetConfig):
    """Which tasks of the server are used."""

    id: str = ID
    task: ToolDecathlonTaskConfig = ToolDecathlonTaskConfig()
    split: str | None = None
    tasks: list[str] | None = None
    """Ids of the tasks; None for all of the split."""


class ToolDecathlonData(vf.TaskData):
    """`launch_time` and the prompt are the same for all rollouts of a group."""

    launch_time: str | None


class ToolDecathlonState(vf.State):
    """`verdict` is set after grading."""

    verdict: dict[str, Any] | None = None
    _managed: ManagedEpisode | None = PrivateAttr(None)

    @property
    def managed(self) -> ManagedEpisode:
        assert self._managed is not None, "the task was not set up"
        return self._managed

    async def close(self) -> None:
        if self._managed is not None:
            await self._managed.close()


class ToolDecathlonTask(vf.Task[ToolDecathlonData, ToolDecathlonState, ToolDecathlonTaskConfig]):
    """One task of the server."""

    @property
    def key(self) -> str:
        return str(self.data.id)

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        managed = await ManagedEpisode.open(
            str(self.data.id),
            url=await anyio.to_thread.run_sync(self.config.server_url),
            token=self.config.token,
            launch_time=self.data.launch_time,
            max_calls=self.config.max_calls,
            tries=self.config.tries,
            labels=self.config.labels,
        )
        trace.state._managed = managed
        trace.info["page"] = managed.episode.page
        _agent_address.set(managed.episode.agent_address or UNOPENED)
        if managed.episode.prompt != self.data.prompt:
            # Other harnesses show this to the model; the default one shows the episode's prompt anyway.
            trace.task.data = self.data.model_copy(update={"prompt": managed.episode.prompt})

    @classmethod
    def toolsets(cls, config: ToolDecathlonTaskConfig) -> list[vf.Toolset]:
        own = EpisodeToolset(vf.ToolsetConfig(url=_agent_address.get()))
        return [*super().toolsets(config), own]

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        episode = trace.state.managed.episode
        try:
            if not episode.claimed and trace.stop_condition not in (None, "agent_completed"):
                await episode.truncate(turns=trace.num_turns)
            verdict = await episode.evaluate()
        finally:
            await trace.state.close()
        trace.state.verdict = trace.info["verdict"] = dict(verdict.raw)

    async def score(self, trace: vf.Trace, runtime: vf.Runtime | None = None) -> None:
        await super().score(trace, runtime)
        verdict = trace.info.get("verdict")
        if verdict is None or self.scoring_deferred:
            return
        trace.record_metrics(verdict["metrics"])
        if not self.config.rubric:
            trace.record_reward("reward", verdict["reward"])
        for name, weight in self.config.rubric.items():
            # A forfeited attempt has not all metrics, and must count in its group's mean; a metric of other
            # tasks, or of a tool that was not called, is 0.
            value = 0.0 if verdict["status"] == "forfeited" else verdict["metrics"].get(name, 0.0)
            trace.record_reward(name, value, weight)


class ToolDecathlonTaskset(vf.Taskset[ToolDecathlonTask, ToolDecathlonConfig]):
    """The server's tasks. Listing them opens no sandbox.

    `load` raises ValueError for tasks that cannot be played, and, with the metrics that there are, for a
    weight on a metric that no task has.
    """

    def load(self) -> Iterable[ToolDecathlonTask]:
        config = self.config
        with sync.Decathlon(config.task.server_url(), config.task.token) as d:
            tasks = playable(d.tasks(split=config.split), config.tasks)
        check_weights(config.task.rubric, tasks)
        for task in tasks:
            # The harness shows the episode's prompt, which is the same unless the prompt here is provisional.
            prompt = task.id if task.prompt_is_provisional else task.prompt
            data = ToolDecathlonData(id=task.id, name=task.id, prompt=prompt, launch_time=task.launch_time)
            yield ToolDecathlonTask(data, config.task)


class ToolDecathlonHarnessConfig(vf.HarnessConfig):
    id: str = ID


class ToolDecathlonHarness(vf.Harness[ToolDecathlonHarnessConfig]):
    """Lets the model call tools until it claims the task or calls none."""

    SUPPORTS_MCP = True  # of its task it uses the episode itself, not its address
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        episode = trace.state.managed.episode
        messages: list[Any] = [{"role": "user", "content": episode.prompt}]
        if data.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        tools: list[Any] = [tool.function for tool in episode.tools]
        async with (
            AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as model,
            sending_notes(episode) as notes,
        ):
            while not episode.claimed:
                try:
                    completion = await model.chat.completions.create(
                        model=ctx.model, messages=messages, tools=tools
                    )
                except APIStatusError:
                    if trace.stop_condition is None:
                        raise
                    break  # one of verifiers' limits refused the turn
                message = completion.choices[0].message
                counts = completion.usage
                usage = counts and {
                    "input_tokens": counts.prompt_tokens,
                    "output_tokens": counts.completion_tokens,
                }
                notes.add(message.content or "", usage=usage)
                # Half a surrogate pair that the model wrote would end the rollout in its next request.
                dump = json.dumps(message.model_dump(exclude_none=True), ensure_ascii=False)
                messages.append(json.loads(dump.encode("utf-8", "replace")))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    reply = await episode.act(
                        call.function.name,
                        call.function.arguments,
                        timeout=self.config.tool_timeout,
                    )
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": reply.text})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def cleanup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await trace.state.close()


class VerifiersEnvConfig(vf.SingleAgentEnvConfig):
    """One agent, whose loop runs in a subprocess without a sandbox: the server has the sandbox."""

    taskset: ToolDecathlonConfig = ToolDecathlonConfig()
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig(), max_turns=100)


class VerifiersEnv(vf.Env[VerifiersEnvConfig]):
    """Runs each task in a sandbox of a decathlon-mcp server; the reward is its verdict's."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        traces: list[vf.Trace] = []
        try:
            await agents.agent.run(task, on_trace=traces.append)
        finally:
            # A rollout that failed is not finalized, and only the default harness closes its episode then.
            for trace in traces:
                await trace.state.close()


def load_environment(
    split: str | None = None,
    rubric: Mapping[str, float] | None = None,
    max_turns: int | None = 100,
    *,
    url: str | None = None,
    server: str | os.PathLike[str] | None = None,
    suite: str | os.PathLike[str] = "starter",
    tasks: Iterable[str] | None = None,
    max_calls: int | None = None,
    harness: str = ID,
    labels: Mapping[str, str] | None = None,
) -> VerifiersEnv:
    """The environment for the tasks of a split (default: all), or for the tasks whose ids are in `tasks`.

    `rubric` has weights of the verdict's metrics, each recorded as a reward; without it the reward is the
    verdict's. A rollout past `max_turns` is truncated: see `Episode.truncate`. `harness` is the id of a
    harness that supports MCP. `labels`: labels of the episodes. Without `url`, and without `DECATHLON_URL`, a
    server for `suite` is started for this process: the program `server`, by default the program installed
    here.
    """
    task = ToolDecathlonTaskConfig(
        url=url,
        server=None if server is None else os.fspath(server),
        suite=os.fspath(suite),
        max_calls=max_calls,
        rubric=dict(rubric or {}),
        labels=dict(labels or {}),
    )
    taskset = ToolDecathlonConfig(split=split, tasks=None if tasks is None else list(tasks), task=task)
    agent = vf.AgentConfig.model_validate(
        {"runtime": vf.SubprocessConfig(), "max_turns": max_turns, "harness": {"id": harness}}
    )
    return VerifiersEnv(VerifiersEnvConfig(taskset=taskset, agent=agent))
