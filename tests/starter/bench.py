"""Runs tasks of the starter suite without a server: their MCP servers, preprocess and evaluator."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sqlite3
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any, Self

import anyio
import pytest
import yaml
from decathlon_client.client_values import CLAIM
from decathlon_client.script import Step
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import CallToolResult, TextContent

from decathlon_mcp.starter import suite_path
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.types import JsonObject
from tests.forks import in_fork

LAUNCH_TIME = "2026-05-06 08:30:00 Wednesday"
PROFILE = load_suite(suite_path()).profile
ENVIRONMENT = dict(PROFILE.environment)
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@dataclass(frozen=True)
class Bench:
    """One task in its own folder, laid out as in a sandbox."""

    root: Path
    task: str
    launch_time: str = LAUNCH_TIME

    @property
    def workspace(self) -> Path:
        return self.root / PROFILE.workspace

    @property
    def folder(self) -> Path:
        return self.root / "tasks" / "starter" / self.task

    @property
    def log(self) -> Path:
        return self.root / PROFILE.log_file

    def prepare(self) -> Self:
        """Copy the suite's shared code and the task to a new folder, and set up its workspace."""
        self.root.mkdir()
        for name in PROFILE.common:
            shutil.copytree(suite_path() / name, self.root / name)
        shutil.copytree(suite_path() / "tasks" / "starter" / self.task, self.folder)
        self.workspace.mkdir()
        if (initial := self.folder / "initial_workspace").is_dir():
            shutil.copytree(initial, self.workspace, dirs_exist_ok=True)
        if (self.folder / "preprocess" / "main.py").is_file():
            done = self.run("preprocess", "--launch_time", self.launch_time)
            assert done.returncode == 0, done.stdout
        return self

    def run(self, part: str, *arguments: str) -> CompletedProcess[str]:
        """Run one of the task's modules from the root, in a fork: a new process would import MCP again."""
        module = f"tasks.starter.{self.task}.{part}.main"

        def execute() -> None:
            sys.argv = [module, "--agent_workspace", str(self.workspace), *arguments]
            sys.path.insert(0, str(self.root))
            runpy.run_module(module, run_name="__main__", alter_sys=True)

        environment = {**os.environ, **ENVIRONMENT, "PATH": PATH}
        return in_fork(execute, folder=self.root, environment=environment, merged=True)

    def answer(self, text: str | None) -> None:
        """Write the log of an episode whose final answer is this text."""
        messages = [{"role": "user", "content": "..."}, {"role": "assistant", "content": text}]
        self.log.parent.mkdir(exist_ok=True)
        log: JsonObject = {"status": "success", "messages": messages, "tool_calls": {}, "key_stats": {}}
        self.log.write_text(json.dumps(log))

    def evaluate(self) -> CompletedProcess[str]:
        if not self.log.exists():
            self.answer(None)
        groundtruth = self.folder / "groundtruth_workspace"
        argument = f"tasks/starter/{self.task}/groundtruth_workspace" if groundtruth.is_dir() else "None"
        return self.run(
            "evaluation", "--res_log_file", str(self.log), "--groundtruth_workspace", argument,
            "--launch_time", self.launch_time,
        )  # fmt: skip

    def assert_fails(self, reason: str) -> None:
        """Assert that the evaluator fails the attempt for this reason."""
        outcome = self.evaluate()
        assert outcome.returncode == 1, outcome.stdout
        assert reason in outcome.stdout.splitlines()[-1]

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text in a file of the workspace; the text must be there."""
        text = (self.workspace / name).read_text()
        assert old in text
        (self.workspace / name).write_text(text.replace(old, new))

    def edit_json(self, name: str, **fields: object) -> None:
        """Set fields of a JSON object in the workspace."""
        value: dict[str, Any] = json.loads((self.workspace / name).read_text())
        (self.workspace / name).write_text(json.dumps({**value, **fields}))

    def move(self, old: str, new: str) -> None:
        (self.workspace / new).parent.mkdir(parents=True, exist_ok=True)
        (self.workspace / old).rename(self.workspace / new)

    def sql(self, database: str, *statements: str) -> None:
        """Change a database of the workspace."""
        with closing(sqlite3.connect(self.workspace / database)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    async def play(self, steps: Sequence[Step]) -> None:
        """Play a script with the task's MCP servers; each reply must match its step."""
        async with self.servers() as clients:
            for step in steps:
                if step.tool == CLAIM:
                    self.answer(step.arguments.get("answer"))
                    continue
                server, tool = step.tool.split("__")
                reply = await clients[server].call_tool(tool, step.resolve(str(self.workspace)))
                text = text_of(reply)
                # A step whose failure is a part of the task expects its message.
                assert not reply.is_error or step.expect, f"{step.tool}: {text}"
                assert step.expect is None or step.expect in text, f"{step.tool}: {text!r}"

    @asynccontextmanager
    async def servers(self) -> AsyncGenerator[dict[str, Client]]:
        """Start the task's MCP servers: the suite's own in this process, which takes a second less each."""
        config = json.loads((self.folder / "task_config.json").read_text())
        async with AsyncExitStack() as stack:
            clients: dict[str, Client] = {}
            for name in config["needed_mcp_servers"]:
                if (self.root / "local_servers" / f"{name}_server.py").exists():
                    clients[name] = (await stack.enter_async_context(serving(name, self.workspace))).client
                else:
                    process = stdio_client(server_parameters(name, self.root, self.workspace))
                    clients[name] = await stack.enter_async_context(Client(process))
            yield clients


def server_parameters(name: str, checkout: Path, workspace: Path) -> StdioServerParameters:
    """Return how a server is started, with the templates filled in."""
    text = (checkout / "configs" / "mcp_servers" / f"{name}.yaml").read_text()
    text = text.replace("${agent_workspace}", str(workspace))
    text = text.replace("${local_servers_paths}", str(checkout / "local_servers"))
    params: dict[str, Any] = yaml.safe_load(text)["params"]
    environment = {"PATH": PATH, **ENVIRONMENT}
    return StdioServerParameters(
        command=params["command"], args=params["args"], cwd=params["cwd"], env=environment
    )


@dataclass(frozen=True)
class Server:
    """One of the suite's own servers, on a workspace."""

    client: Client
    workspace: Path

    async def call_ok(self, tool: str, *, fails: bool = False, **arguments: object) -> str:
        """Call a tool that must succeed, and return its text."""
        with anyio.fail_after(60):
            reply = await self.client.call_tool(tool, arguments)
        text = text_of(reply)
        assert reply.is_error == fails, text
        return text

    async def call_error(self, tool: str, **arguments: object) -> str:
        """Call a tool that must fail, and return its text."""
        return await self.call_ok(tool, fails=True, **arguments)


def text_of(reply: CallToolResult) -> str:
    return "\n".join(part.text for part in reply.content if isinstance(part, TextContent))


@asynccontextmanager
async def serving(name: str, workspace: Path) -> AsyncGenerator[Server]:
    """Serve one of the suite's own servers in this process, as configured. A stage of the lab is shorter."""
    parameters = server_parameters(name, suite_path(), workspace)
    file = suite_path() / "local_servers" / f"{name}_server.py"
    assert parameters.args[0] == str(file)
    module = ModuleType(file.stem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(file.parent), *sys.path])
        patch.setattr(sys, "argv", parameters.args)
        patch.setitem(sys.modules, module.__name__, module)  # pydantic looks up its types there
        exec(compile(file.read_bytes(), file, "exec"), vars(module))
        vars(module)["STAGE_SECONDS"] = 0.02
        async with Client(vars(module)["server"]) as client:
            yield Server(client, workspace)
