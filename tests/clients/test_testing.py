"""The scripted model that users try their programs with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx2
import pytest
from decathlon_client import Decathlon, Episode
from decathlon_client.script import Step
from decathlon_client.testing import bundled_steps, chat_completion, next_move, response, scripted_model

from decathlon_mcp.starter import oracle, oracle_ids
from decathlon_mcp.types import JsonObject
from tests.docs.pages import block
from tests.docs.snippets import run
from tests.network_guard import NetworkGuard
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio
COMMAND = (sys.executable, "-m", "decathlon_client.testing")


@pytest.fixture
async def starter(tmp_path: Path) -> AsyncGenerator[Served]:
    state = tmp_path / "state"
    async with serving(state, suite=("starter",), provider="host", isolation="auto") as served:
        yield served


@pytest.mark.slow
@pytest.mark.long
async def test_a_program_of_a_page_plays_with_what_the_command_prints(
    starter: Served, tmp_path: Path
) -> None:
    guard = NetworkGuard.compile(tmp_path)
    # Only started here, which does not block.
    with subprocess.Popen([*COMMAND], stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        try:
            assert process.stdout is not None
            export, *words = process.stdout.readline().split()
            assert export == "export"
            environment = {**dict(word.split("=", 1) for word in words), **guard.environment}
            program = block("docs/training.md", "Any endpoint, any trainer", "python")
            output = await run(
                program, [sys.executable], url=starter.url, folder=tmp_path, environment=environment
            )
        finally:
            process.terminate()
    assert sorted(output.splitlines()) == ["audit-expenses 1.0 None"] * 2 + ["tune-reactor 1.0 None"] * 2
    assert not guard.attempts


@pytest.mark.slow
async def test_it_solves_every_bundled_task(starter: Served) -> None:
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
            async with d.batch(await d.tasks(prompts=False), concurrency=2, progress=False) as batch:
                results = [result async for result in batch.run(play)]
    assert len(results) == 10
    rewards = {result.task: result.reward for result in results}
    assert rewards == dict.fromkeys(oracle_ids(), 1.0), [result.failure for result in results]


def test_a_step_is_chosen_by_the_results_in_the_conversation() -> None:
    steps = oracle("tune-reactor")
    tools: list[JsonObject] = [{"function": {"name": step.tool, "parameters": {}}} for step in steps]
    result = {"role": "tool", "content": "done"}
    for done, step in enumerate(steps):
        request: JsonObject = {"model": "m", "messages": [result] * done, "tools": tools}
        (choice,) = chat_completion(request, steps)["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == step.tool
    (choice,) = chat_completion({"model": "m", "messages": [result] * len(steps), "tools": tools}, steps)[
        "choices"
    ]
    assert "tool_calls" not in choice["message"]


def test_a_name_that_a_framework_changed_is_recognised() -> None:
    step = Step("files__read_file", {"path": "a"})
    assert next_move([step], 0, ["toolathlon_files_read_file"]).tool == "toolathlon_files_read_file"


def test_the_workspace_of_the_prompt_replaces_its_placeholder() -> None:
    steps = [Step("git__git_log", {"repo_path": "{workspace}/repository", "paths": ["{workspace}/a"]})]
    expected = {"repo_path": "/e/1/workspace/repository", "paths": ["/e/1/workspace/a"]}
    prompt = "See https://example.org/x\n/e/1/workspace is yours."
    chat = {"model": "m", "tools": [{"function": {"name": "git__git_log"}}]}
    for content in (prompt, [{"type": "text", "text": prompt}]):
        reply = chat_completion({**chat, "messages": [{"role": "user", "content": content}]}, steps)
        function = reply["choices"][0]["message"]["tool_calls"][0]["function"]
        assert json.loads(function["arguments"]) == expected
    responses = {"model": "m", "tools": [{"name": "git__git_log"}]}
    for request in ({"instructions": prompt, "input": "Begin."}, {"input": [{"content": prompt}]}):
        (call,) = response({**responses, **request}, steps)["output"]
        assert json.loads(call["arguments"]) == expected


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text('{"tool": 3}\n')
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run([*COMMAND, file], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        ": line 1: `tool` must be a string, and `arguments` an object"
    )
