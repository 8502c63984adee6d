"""The scripted model that users try their programs with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import httpx2
import pytest
from decathlon_client import Decathlon, Episode
from decathlon_client.script import Step
from decathlon_client.testing import bundled_steps, next_move, response, scripted_model

from decathlon_mcp.types import JsonObject
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio
COMMAND = (sys.executable, "-m", "decathlon_client.testing")


@pytest.fixture
async def starter(tmp_path: Path) -> AsyncGenerator[Served]:
    state = tmp_path / "state"
    async with serving(state, suite=("starter",), provider="host", isolation="auto") as served:
        yield served


async def test_the_command_prints_the_variables_of_its_endpoint() -> None:
    async with await anyio.open_process([*COMMAND]) as process:
        assert process.stdout is not None
        export, *words = (await process.stdout.receive()).decode().split()
        assert export == "export"
        variables = dict(word.split("=", 1) for word in words)
        body = {"model": "m", "messages": [{"role": "user", "content": "Begin."}]}
        async with httpx2.AsyncClient(base_url=variables["OPENAI_BASE_URL"]) as http:
            assert (await http.post("/chat/completions", json=body)).json()["choices"]
        process.terminate()


@pytest.mark.slow
async def test_it_solves_bundled_tasks(starter: Served) -> None:
    tasks = ["build-quarter-workbook", "find-rate-regression", "tune-reactor"]

    async def play(episode: Episode) -> None:
        messages: list[JsonObject] = [{"role": "user", "content": episode.prompt}]
        tools = [tool.function for tool in episode.tools]
        while not episode.claimed:
            body = {"model": "m", "messages": messages, "tools": tools}
            message = (await http.post("/chat/completions", json=body)).json()["choices"][0]["message"]
            messages.append(message)
            for call in message["tool_calls"]:
                function = call["function"]
                reply = await episode.act(function["name"], function["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": reply.text})

    with scripted_model(bundled_steps) as url:
        async with httpx2.AsyncClient(base_url=url) as http, Decathlon(starter.url) as d:
            async with d.batch(tasks, concurrency=2, progress=False) as batch:
                results = [result async for result in batch.run(play)]
    rewards = {result.task: result.reward for result in results}
    assert rewards == dict.fromkeys(tasks, 1.0), [result.failure for result in results]


def test_a_name_that_a_framework_changed_is_recognised() -> None:
    step = Step("files__read_file", {"path": "a"})
    assert next_move([step], 0, ["toolathlon_files_read_file"]).tool == "toolathlon_files_read_file"


def test_the_workspace_of_the_prompt_replaces_its_placeholder() -> None:
    steps = [Step("git__git_log", {"repo_path": "{workspace}/repository", "paths": ["{workspace}/a"]})]
    prompt = "See https://example.org/x\n/e/1/workspace is yours."
    requests: list[JsonObject] = [
        {"instructions": prompt, "input": "Begin."},
        {"input": [{"content": prompt}]},
    ]
    for request in requests:
        (call,) = response({"model": "m", "tools": [{"name": "git__git_log"}], **request}, steps)["output"]
        assert json.loads(call["arguments"]) == {
            "repo_path": "/e/1/workspace/repository",
            "paths": ["/e/1/workspace/a"],
        }


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text('{"tool": 3}\n')
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run([*COMMAND, file], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        ": line 1: `tool` must be a string, and `arguments` an object"
    )
