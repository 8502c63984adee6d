"""The log that evaluators get, in Toolathlon's format."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from decathlon_sandbox.truncation import cut

from decathlon_mcp.driver.replies import OVERLONG_KEY
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.grading.verdict import Outcome, build_verdict
from decathlon_mcp.plugins.toolathlon.traj_log import TrajectoryLog, eval_res, task_status
from decathlon_mcp.suites.suite_file import read_suite_file
from tests.episodes.environment import TOOLS, exits_with, running_registry, suite_with
from tests.fakes.provider import FakeProvider
from tests.grading.support import PAPER, make_attempt, make_call, write_suite

ROOT = PurePosixPath("/workspace")
TOOL = {"name": "read", "description": "Reads.", "inputSchema": {"type": "object"}}


def log_of(tmp_path: Path, attempt: Attempt, files: dict[str, str] | None = None) -> dict[str, Any]:
    suite = write_suite(tmp_path / "checkout", {"suite.yaml": "profile: toolathlon\n", **(files or {})})
    chunks = TrajectoryLog(attempt, suite=suite, task=suite.tasks["paper"], root=ROOT)
    return json.loads(b"".join(chunks))


def test_config_has_the_fields_of_toolathlons_task_config(tmp_path: Path) -> None:
    config = log_of(
        tmp_path,
        make_attempt(),
        {
            f"{PAPER}/task_config.json": json.dumps(
                {
                    "needed_mcp_servers": ["files"],
                    "needed_local_tools": ["claim_done", "sleep"],
                    "meta": {"level": 2},
                    "max_turns": 7,
                }
            ),
            f"{PAPER}/groundtruth_workspace/answer": "42",
            f"{PAPER}/preprocess/main.py": "",
        },
    )["config"]
    assert config == {
        "task_dir": "train/paper",
        "id": "train-paper",
        "needed_mcp_servers": ["files"],
        "needed_local_tools": ["claim_done", "sleep"],
        "task_root": "/workspace/dumps",
        "task_str": "Find the paper.",
        "log_file": "/workspace/dumps/traj_log.json",
        "agent_workspace": "/workspace/dumps/workspace",
        "launch_time": "2026-11-21 09:30:00 Saturday",
        "max_turns": 7,
        "max_steps_under_single_turn_mode": 200,
        "single_turn_mode": True,
        "cn_mode": False,
        "system_prompts": {"agent": "Be careful.", "user": None},
        "initialization": {
            "workspace": None,
            "process_command": "uv run -m tasks.train.paper.preprocess.main",
        },
        "stop": {"user_phrases": ["#### STOP"], "tool_names": ["local-claim_done"]},
        "evaluation": {
            "groundtruth_workspace": "tasks/train/paper/groundtruth_workspace",
            "evaluation_command": "uv run -m tasks.train.paper.evaluation.main",
        },
        "meta": {"level": 2},
        "local_token_key_session": None,
    }


def test_messages_are_the_task_the_calls_and_the_answer(tmp_path: Path) -> None:
    calls = [
        make_call(1, server="arxiv_local", tool="search", name="arxiv_local__search"),
        make_call(2, server="local", tool="python-execute", arguments={"code": "1\u00b2"}),
    ]
    messages = log_of(tmp_path, make_attempt(calls=calls, answer="It is 1706.03762."))["messages"]
    assert messages == [
        {"role": "user", "content": "Find the paper."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "arxiv_local-search", "arguments": '{"path": "a"}'},
                }
            ],
        },
        {
            "role": "tool",
            "content": '{"type":"text","text":"result 1","annotations":null}',
            "tool_call_id": "call_1",
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_2",
                    "type": "function",
                    "function": {"name": "local-python-execute", "arguments": '{"code": "1\u00b2"}'},
                }
            ],
        },
        {"role": "tool", "content": "result 2", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "It is 1706.03762."},
    ]


def test_results_have_toolathlons_format(tmp_path: Path) -> None:
    two = [{"type": "text", "text": "a"}, {"type": "image", "data": "", "mimeType": "image/png"}]
    results: list[dict[str, Any] | None] = [
        {"content": two},
        {"content": []},
        {"error": {"code": -32602, "message": "no such tool"}},
        {"error": "cancelled"},
        None,
    ]
    calls = [make_call(seq, result=result) for seq, result in enumerate(results)]
    log = log_of(tmp_path, make_attempt(calls=calls))["messages"]
    assert [message["content"] for message in log if message["role"] == "tool"] == [
        json.dumps([{**item, "annotations": None} for item in two]),
        "[]",
        "Error running tool files-read: no such tool",
        "Error running tool files-read: cancelled",
        "Error running tool files-read: no result",
    ]


def test_tools_and_key_stats_are_filled(tmp_path: Path) -> None:
    start = datetime(2026, 11, 21, 9, 30, tzinfo=UTC)
    attempt = make_attempt(
        tools={"files": [TOOL]},
        answer="done",
        started_at=start,
        claimed_at=start + timedelta(seconds=65),
        seconds=65.0,
    )
    log = log_of(tmp_path, attempt)
    assert log["status"] == "success"
    assert (log["initial_run_time"], log["completion_time"]) == (
        "2026-11-21 09:30:00",
        "2026-11-21 09:31:05",
    )
    assert log["tool_calls"] == {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "files-read",
                    "description": "Reads.",
                    "parameters": {"properties": {}, "type": "object"},
                },
            }
        ],
        "tool_choice": "auto",
    }
    assert log["key_stats"] == {
        "interaction_turns": 1,
        "tool_calls": 2,
        "agent_llm_requests": 3,
        "total_tokens": 0,
        "input_tokens": 0,
        "output_tokens": 0,
        "total_turns": 4,
        "total_messages": 6,
        "truncations": 0,
        "user_input_turns": 1,
        "assistant_turns": 3,
        "failed_tool_calls": 1,
        "tools_used": 2,
        "seconds": 65.0,
    }


def test_task_dir_of_a_gym_task_has_one_part(tmp_path: Path) -> None:
    files = {"suite.yaml": "profile: gym\ntask_base: tasks/train\n"}
    config = log_of(tmp_path, make_attempt(), files)["config"]
    assert (config["task_dir"], config["id"]) == ("paper", "paper")
    assert config["launch_time"] == "2026-11-21 09:30:00 Saturday"
    assert config["evaluation"]["groundtruth_workspace"] is None


def test_cut_reply_is_logged_as_the_agent_saw_it(tmp_path: Path) -> None:
    overlong = cut({"content": [{"type": "text", "text": "a" * 200_000}]}, "/workspace/folder", 100_000)
    assert overlong is not None
    result = {**overlong.result, "_meta": {OVERLONG_KEY: {"path": overlong.path}}}
    log = log_of(tmp_path, make_attempt(calls=[make_call(1, result=result)]))["messages"]
    (message,) = (message for message in log if message["role"] == "tool")
    assert message["content"] == overlong.result["content"][0]["text"]


NOT_EVALUATED = "only SUCCESS counts as pass; pass is null"


@pytest.mark.parametrize(
    ("profile", "attempt", "outcome", "status", "result"),
    [
        ("toolathlon", {}, "pass", "success", {"pass": True, "details": ""}),
        (
            "toolathlon",
            {"claimed": False, "truncated_by": "calls"},
            "forfeited",
            "max_turns_reached",
            {"pass": None, "details": f"Task status: max_turns_reached, {NOT_EVALUATED}. why"},
        ),
        (
            "toolathlon",
            {"claimed": False, "truncated_by": "client"},
            "pass",
            "max_turns_reached",
            {"pass": True, "details": ""},
        ),
        (
            "gym",
            {"claimed": False},
            "fail",
            "failed",
            {"pass": None, "details": f"Task status: failed, {NOT_EVALUATED}"},
        ),
    ],
)
def test_status_and_result_use_upstreams_words(
    tmp_path: Path, profile: str, attempt: dict[str, Any], outcome: str, status: str, result: dict[str, Any]
) -> None:
    (tmp_path / "suite.yaml").write_text(f"profile: {profile}\n")
    suite_profile, _ = read_suite_file(tmp_path)
    closed = make_attempt(**attempt)
    outcomes = {
        "pass": Outcome(status="scored", success=True, reward=1.0),
        "fail": Outcome(status="scored", success=False, reward=0.0),
        "forfeited": Outcome(status="forfeited", detail="why"),
    }
    verdict = build_verdict(closed, outcomes[outcome])
    assert task_status(closed, suite_profile) == status
    assert eval_res(closed, suite_profile, verdict) == result


@pytest.mark.anyio
async def test_a_graded_episode_has_the_files_of_toolathlons_viewer(tmp_path: Path) -> None:
    suite = suite_with(tmp_path, grades_truncated=False)
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(tmp_path, provider, suite=suite) as registry:
        episode = registry.start("find-answer", Principal())
        await episode.ready()
        await episode.claim_done("done", truncated=True)
        await episode.evaluate()
        folder = episode.files.folder
        assert json.loads((folder / "traj_log.json").read_text())["status"] == "max_turns_reached"
        result = json.loads((folder / "eval_res.json").read_text())
        assert result["pass"] is None
        assert result["details"].startswith("Task status: max_turns_reached, only SUCCESS counts as pass")
