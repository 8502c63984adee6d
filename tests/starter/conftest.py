"""A bench to play the starter suite's tasks on: their real servers, preprocess and evaluators, nothing of ours between."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import yaml
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import TextContent

from decathlon_mcp.starter import CLAIM, Step, oracle, suite_path

LAUNCH_TIME = "2026-05-06 08:30:00 Wednesday"
DECLARED: dict[str, Any] = yaml.safe_load((suite_path() / "suite.yaml").read_text())
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@dataclass(frozen=True)
class Outcome:
    """What an evaluator said."""

    exit_code: int
    output: str


@dataclass(frozen=True)
class Bench:
    """One task laid out in a folder of its own, as a sandbox would have it."""

    root: Path
    task: str
    launch_time: str = LAUNCH_TIME

    @property
    def workspace(self) -> Path:
        return self.root / DECLARED["workspace"]

    @property
    def folder(self) -> Path:
        return self.root / "tasks" / "starter" / self.task

    @property
    def log(self) -> Path:
        return self.root / DECLARED["log_file"]

    def prepare(self) -> None:
        """Lay out the suite's shared code and the one task; set its workspace up."""
        for name in DECLARED["common"]:
            shutil.copytree(suite_path() / name, self.root / name)
        shutil.copytree(suite_path() / "tasks" / "starter" / self.task, self.folder)
        self.workspace.mkdir()
        if (initial := self.folder / "initial_workspace").is_dir():
            shutil.copytree(initial, self.workspace, dirs_exist_ok=True)
        if (self.folder / "preprocess" / "main.py").is_file():
            done = self.run("preprocess", "--launch_time", self.launch_time)
            assert done.exit_code == 0, done.output

    def run(self, part: str, *words: str) -> Outcome:
        """Run one of the task's modules as the dialect says, from the root."""
        command = [*DECLARED["run_module"], f"tasks.starter.{self.task}.{part}.main"]
        done = subprocess.run(
            [*command, "--agent_workspace", str(self.workspace), *words],
            cwd=self.root,
            env={**os.environ, **DECLARED["environment"], "PATH": PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        return Outcome(done.returncode, done.stdout)

    def answer(self, text: str | None) -> None:
        """Write the log as an episode that ends with these last words leaves it."""
        said = [{"role": "user", "content": "..."}, {"role": "assistant", "content": text}]
        self.log.parent.mkdir(exist_ok=True)
        self.log.write_text(json.dumps({"status": "success", "messages": said, "tool_calls": {}, "key_stats": {}}))

    def evaluate(self) -> Outcome:
        """Run the evaluator."""
        if not self.log.exists():
            self.answer(None)
        truth = self.folder / "groundtruth_workspace"
        given = f"tasks/starter/{self.task}/groundtruth_workspace" if truth.is_dir() else "None"
        return self.run(
            "evaluation", "--res_log_file", str(self.log), "--groundtruth_workspace", given,
            "--launch_time", self.launch_time,
        )  # fmt: skip

    def copy(self, root: Path) -> Bench:
        """The same, to go on with elsewhere."""
        shutil.copytree(self.root, root, symlinks=True)
        return Bench(root, self.task, self.launch_time)

    async def play(self, steps: Sequence[Step]) -> None:
        """Play a script through the task's own servers; each reply must be as its step expects."""
        async with self.servers() as sessions:
            for step in steps:
                if step.tool == CLAIM:
                    self.answer(step.arguments.get("answer"))
                    continue
                server, tool = step.tool.split("__")
                reply = await sessions[server].call_tool(tool, step.filled(str(self.workspace)))
                said = "\n".join(part.text for part in reply.content if isinstance(part, TextContent))
                assert not reply.is_error, f"{step.tool}: {said}"
                assert step.expect is None or step.expect in said, f"{step.tool} said {said!r}"

    @asynccontextmanager
    async def servers(self) -> AsyncIterator[dict[str, ClientSession]]:
        """The task's MCP servers, started as their configurations say."""
        config = json.loads((self.folder / "task_config.json").read_text())
        async with AsyncExitStack() as stack:
            sessions: dict[str, ClientSession] = {}
            for name in config["needed_mcp_servers"]:
                streams = await stack.enter_async_context(stdio_client(self.server(name)))
                sessions[name] = await stack.enter_async_context(ClientSession(*streams))
            for session in sessions.values():
                await session.initialize()
            yield sessions

    def server(self, name: str) -> StdioServerParameters:
        """How a server is started, its templates filled."""
        text = (self.root / "configs" / "mcp_servers" / f"{name}.yaml").read_text()
        text = text.replace("${agent_workspace}", str(self.workspace))
        text = text.replace("${local_servers_paths}", str(self.root / "local_servers"))
        params = cast("dict[str, Any]", yaml.safe_load(text)["params"])
        return StdioServerParameters(
            command=params["command"], args=params["args"], cwd=params["cwd"], env={"PATH": PATH}
        )


@pytest.fixture
def lay_out(tmp_path: Path) -> LayOut:
    """Lays a task out, ready to be attempted."""
    return LayOut(tmp_path)


@dataclass(frozen=True)
class LayOut:
    where: Path

    def __call__(self, task: str, launch_time: str = LAUNCH_TIME) -> Bench:
        root = self.where / f"episode-{len(list(self.where.iterdir()))}"
        root.mkdir()
        bench = Bench(root, task, launch_time)
        bench.prepare()
        return bench


class Solved:
    """Tasks as their oracles leave them, each played once in a test run; take a copy to spoil."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.benches: dict[str, Bench] = {}

    async def __call__(self, task: str, into: Path) -> Bench:
        if task not in self.benches:
            root = self.where / task
            root.mkdir()
            bench = Bench(root, task)
            bench.prepare()
            with anyio.fail_after(120):
                await bench.play(oracle(task))
            self.benches[task] = bench
        return self.benches[task].copy(into)


@pytest.fixture(scope="session")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Solved:
    return Solved(tmp_path_factory.mktemp("solved"))
