"""`traj_log.json` in Toolathlon's format, built from the recorded calls.

Follows `TaskAgent.save_results` (utils/roles/task_agent.py), `TaskConfig.to_dict` (utils/data_structures/
task_config.py) and `_process_turn_records` (utils/roles/context_managed_runner.py). Tools always have
Toolathlon's spelling (`arxiv_local-search`): an evaluator must not depend on the server's `--names`. The
values of the task's tokens, which Toolathlon writes into the log, are left out.

The member `provenance` is an addition: it says which parts the server observed, and which are claims of the
agent's sandbox. An agent that is root there can stop a tool server and write replies in its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, cast
from uuid import uuid4

from decathlon_sandbox.truncation import model_text

from decathlon_mcp.driver.replies import OVERLONG_KEY
from decathlon_mcp.grading.attempt import Attempt, CallRecord
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.prompts import LOCAL
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject, as_object

MAX_TURNS, MAX_STEPS = 50, 200
"""Toolathlon's limits (scripts/formal_run_v0.json). They are only reported, never enforced."""
PROVENANCE: JsonObject = {
    "server": ["config", "key_stats", "the names, arguments, order and number of calls in messages"],
    "sandbox": ["tool_calls.tools", "the content of messages with role tool", "key_stats.failed_tool_calls"],
    "note": "What the sandbox sent is a claim of the agent's sandbox: an agent that is root can forge it.",
}


class TrajectoryLog:
    """The log of a closed attempt as JSON: iterate it for its chunks, which are the same every time.

    `root` is the suite's folder in the sandbox that reads it. Every iteration reads the calls from disk, one
    by one: run it in a worker thread.
    """

    def __init__(self, attempt: Attempt, *, suite: Suite, task: Task, root: PurePosixPath) -> None:
        self._attempt = attempt
        config = _config(attempt, suite, task, root)
        self._before: JsonObject = {
            "config": config,
            "request_id": str(uuid4()),
            "initial_run_time": _time(attempt.started_at),
            "completion_time": _time(attempt.claimed_at),
            "tool_calls": {"tools": _tools(attempt), "tool_choice": "auto"},
            "status": task_status(attempt, suite.profile),
        }
        self._after: JsonObject = {
            "key_stats": _key_stats(attempt),
            "agent_cost": _NO_COST,
            "user_cost": _NO_COST,
            "provenance": PROVENANCE,
            "resumed": False,
            "session_id": f"task_{config['id']}_session",
            "history_file": None,
        }

    def __iter__(self) -> Iterator[bytes]:
        yield json.dumps(self._before)[:-1].encode() + b', "messages": ['
        separator = b""
        for message in _messages(self._attempt):
            yield separator + json.dumps(message).encode()
            separator = b", "
        yield b"], " + json.dumps(self._after)[1:].encode()


def task_status(attempt: Attempt, profile: SuiteProfile) -> str:
    """Upstream's `TaskStatus` of a closed attempt.

    In a suite that requires a claim, an attempt without a claim is `failed`, as in toolathlon_gym.
    """
    if attempt.truncated:
        return "max_turns_reached"
    return "failed" if profile.claim_required and not attempt.claimed else "success"


def eval_res(attempt: Attempt, profile: SuiteProfile, verdict: Verdict) -> JsonObject:
    """The content of `eval_res.json`. `pass` is null for an attempt that upstream does not evaluate.

    An attempt that a limit ended has a result if it was graded here.
    """
    status = task_status(attempt, profile)
    graded = status == "success" or (status == "max_turns_reached" and verdict.status == "scored")
    if graded:
        return {"pass": verdict.success, "details": verdict.detail}
    details = f"Task status: {status}, only SUCCESS counts as pass; pass is null"
    return {"pass": None, "details": f"{details}. {verdict.detail}".removesuffix(". ")}


def _config(attempt: Attempt, suite: Suite, task: Task, root: PurePosixPath) -> JsonObject:
    profile = suite.profile
    task_dir = suite.task_dir(task)
    command = " ".join(profile.run_module)
    module = ".".join(task.folder.parts)
    log_file, parts = root / profile.log_file, task.files
    return {
        "task_dir": task_dir,
        "id": task_dir.replace("/", "-"),
        "needed_mcp_servers": task.config.get("needed_mcp_servers", []),
        "needed_local_tools": task.config.get("needed_local_tools", []),
        "task_root": str(log_file.parent),
        "task_str": attempt.prompt.task,
        "log_file": str(log_file),
        "agent_workspace": str(root / profile.workspace),
        "launch_time": suite.launch_time(attempt.launch_time),
        "max_turns": task.max_turns or MAX_TURNS,
        "max_steps_under_single_turn_mode": MAX_STEPS,
        "single_turn_mode": True,
        "cn_mode": suite.language == "cn",
        "system_prompts": {"agent": attempt.prompt.system, "user": None},
        "initialization": {
            "workspace": str(task.folder / parts.initial_workspace) if parts.initial_workspace else None,
            "process_command": f"{command} {module}.{parts.preprocess}" if parts.preprocess else None,
        },
        "stop": {"user_phrases": ["#### STOP"], "tool_names": ["local-claim_done"]},
        "evaluation": {
            "groundtruth_workspace": str(task.folder / parts.groundtruth) if parts.groundtruth else None,
            "evaluation_command": f"{command} {module}.{parts.evaluation}",
        },
        "meta": dict(task.meta),
        "local_token_key_session": None,
    }


def _tools(attempt: Attempt) -> list[JsonObject]:
    return [
        {
            "type": "function",
            "function": {
                "name": f"{server}-{tool.get('name')}",
                "description": tool.get("description") or "",
                "parameters": {"properties": {}, **(as_object(tool.get("inputSchema")) or {})},
            },
        }
        for server, tools in attempt.tools.items()
        for tool in tools
    ]


def _messages(attempt: Attempt) -> Iterator[JsonObject]:
    yield {"role": "user", "content": attempt.prompt.task}
    for call in attempt.calls:
        yield from _exchange(call)
    if attempt.answer is not None:
        yield {"role": "assistant", "content": attempt.answer}


def _exchange(call: CallRecord) -> list[JsonObject]:
    name, call_id = f"{call.server}-{call.tool}", f"call_{call.seq}"
    function = {"name": name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "content": _content(call, name), "tool_call_id": call_id},
    ]


def _content(call: CallRecord, name: str) -> str:
    """One content item as its JSON, several as a JSON array; plain text for local tools and cut replies.

    Follows utils/openai_agents_monkey_patch: `custom_mcp_util.py` and, for a call without a result,
    `custom_run_impl.py`.
    """
    result = call.result or {}
    if "content" not in result:
        error = as_object(result.get("error"))
        message = error.get("message") if error else result.get("error")
        return f"Error running tool {name}: {message or 'no result'}"
    items = cast("list[Any]", result["content"]) if isinstance(result["content"], list) else []
    texts = [(as_object(item) or {}).get("text") for item in items]
    plain = call.server == LOCAL or OVERLONG_KEY in (as_object(result.get("_meta")) or {})
    if items and plain and all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts))
    return model_text(result)


def _key_stats(attempt: Attempt) -> JsonObject:
    """Toolathlon's counters, 0 where the server cannot know them, and the server's own metrics."""
    counts = {name: round(number, 3) for name, number in attempt.counts.items()}
    calls = attempt.call_counts.calls
    turns = attempt.turns if attempt.turns is not None else calls + (attempt.answer is not None)
    return {
        "interaction_turns": 1,
        "tool_calls": calls,
        "agent_llm_requests": turns,
        "total_tokens": 0,
        "input_tokens": 0,
        "output_tokens": 0,
        "total_turns": turns + 1,
        "total_messages": 1 + 2 * calls + (attempt.answer is not None),
        "truncations": 0,
        "user_input_turns": 1,
        "assistant_turns": turns,
        "failed_tool_calls": int(counts["failed_calls"]),
        "tools_used": int(counts["tools_used"]),
        "seconds": counts.get("seconds"),
    }


def _time(time: datetime | None) -> str:
    return "unknown" if time is None else time.strftime("%Y-%m-%d %H:%M:%S")


_NO_COST: JsonObject = {
    "total_cost": 0,
    "total_input_tokens": 0,
    "total_output_tokens": 0,
    "total_requests": 0,
}
