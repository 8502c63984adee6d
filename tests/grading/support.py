"""Small checkouts, closed attempts, and a grader that uses real sandboxes."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import anyio

from decathlon_mcp.archives.writing import pack_files
from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.episodes.extensions import suite_hooks
from decathlon_mcp.grading.attempt import Attempt, CallCounts, CallRecord, Facts
from decathlon_mcp.grading.evaluation import grade
from decathlon_mcp.grading.inputs import CapturedWorkspace, GradingJob, OpenSandbox
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.sandboxes.base import Provider, Sandbox, SandboxSpec
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.prompts import Prompt
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.types import Network

PAPER = "tasks/train/paper"
LAUNCH_TIME = datetime(2026, 11, 21, 9, 30)


def write_suite(checkout: Path, files: Mapping[str, str]) -> Suite:
    """Write a checkout with one task, `paper`, and these files (paths relative to the checkout)."""
    for name, text in {
        "suite.yaml": "profile: starter\n",
        f"{PAPER}/task_config.json": '{"needed_mcp_servers": []}',
        f"{PAPER}/docs/task.md": "Find the paper.",
        f"{PAPER}/evaluation/main.py": "",
        **files,
    }.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text, "utf-8")
    return load_suite(checkout)


def make_call(seq: int, server: str = "files", tool: str = "read", **fields: Any) -> CallRecord:
    values: dict[str, Any] = {
        "seq": seq,
        "server": server,
        "tool": tool,
        "name": f"{server}__{tool}",
        "arguments": {"path": "a"},
        "result": {"content": [{"type": "text", "text": f"result {seq}"}]},
        "failed": False,
        "started_at": 1e9 + seq,
        "seconds": 0.1,
        **fields,
    }
    return CallRecord(**values)


def make_attempt(**fields: Any) -> Attempt:
    """A claimed attempt at `paper` with two calls; `fields` override its fields and facts."""
    facts = {name: fields.pop(name) for name in Facts.model_fields.keys() & fields.keys()}
    values: dict[str, Any] = {
        "episode": "e1",
        "task": "paper",
        "suite": "checkout",
        "isolation": "none",
        "agent_network": "outbound",
        "grader_network": "none",
        "launch_time": LAUNCH_TIME,
        "prompt": Prompt("Be careful.", "Find the paper."),
        "calls": [make_call(1), make_call(2, tool="write", failed=True)],
        "claimed": True,
        "facts": Facts.model_validate({"suite_revision": "r1", **facts}),
        **fields,
    }
    calls = [call for call in values["calls"] if call is not None]
    tools = {(call.server, call.tool) for call in calls}
    counts = CallCounts(len(calls), sum(call.failed for call in calls), len(tools))
    values.setdefault("call_counts", counts)
    return Attempt(**values)


def tar_of(files: Mapping[str, str | bytes]) -> bytes:
    """A tar archive with these files."""
    return pack_files({k: v.encode() if isinstance(v, str) else v for k, v in files.items()}, mode=0o644)


@dataclass
class SandboxGrader:
    """Grades attempts in sandboxes of a provider; records the networks it was asked for."""

    folder: Path
    provider: Provider
    networks: list[Network] = field(default_factory=list[Network])

    @asynccontextmanager
    async def open(self, network: Network) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
        self.networks.append(network)
        name = f"rewards-{secrets.token_hex(4)}"
        spec = SandboxSpec(name, BOOT_COMMAND, PurePosixPath("/episode"), network=network)
        async with self.provider.open(spec) as sandbox, connect(sandbox) as driver:
            yield sandbox, driver

    async def verdict(
        self,
        files: Mapping[str, str],
        workspace: Mapping[str, str | bytes] | Path | None = MappingProxyType({}),
        *,
        attempt: Attempt | None = None,
        **options: Any,
    ) -> Verdict:
        """Grade an attempt in a new checkout with these files, within a minute."""
        suite = write_suite(self.folder / secrets.token_hex(4) / "checkout", files)
        with anyio.fail_after(60):
            return await self.grade(attempt or make_attempt(), suite, workspace, **options)

    async def grade(
        self,
        attempt: Attempt,
        suite: Suite,
        workspace: Mapping[str, str | bytes] | Path | None,
        *,
        open_sandbox: OpenSandbox | None = None,
        deadline_seconds: float = 60,
        sealed: Path | None = None,
        in_place: bool = False,
    ) -> Verdict:
        common = self.folder / "common.tar"
        suite.common_archive(common)
        archive = workspace if isinstance(workspace, Path) else None
        if workspace is not None and not isinstance(workspace, Path):
            archive = self.folder / "workspace.tar"
            archive.write_bytes(tar_of(workspace))
        job = GradingJob(
            attempt=attempt,
            suite=suite,
            task=suite.tasks["paper"],
            open_sandbox=open_sandbox or self.open,
            captured=CapturedWorkspace(archive, sealed),
            common=common,
            deadline_seconds=deadline_seconds,
            log=suite_hooks(suite).evaluator_log,
            in_place=in_place,
        )
        return await grade(job)


def rubric_text(**fields: Any) -> str:
    """The text of a rubric file (JSON is YAML)."""
    return json.dumps(fields)


def names_in(folder: PurePosixPath) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())
