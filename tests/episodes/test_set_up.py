"""Set-up of a task: its steps, its failures, and the removal of the answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.errors import SetUpError
from tests.episodes.environment import TOOLS, ended, running_registry, suite_with
from tests.fakes.driver import FakeRun, Faults, RunReply
from tests.fakes.provider import FakeProvider
from tests.probe.serving import SUITE
from tests.storage.trajectories import events

pytestmark = pytest.mark.anyio

PLAYER = Principal()


async def set_up_error(
    tmp_path: Path, provider: FakeProvider, task: str, *, suite: str | Path = SUITE, **settings: Any
) -> SetUpError:
    """The error of an episode whose set-up fails; checks that the episode ended because of it."""
    async with running_registry(tmp_path, provider, suite=suite, **settings) as registry:
        episode = registry.start(task, PLAYER)
        with pytest.raises(SetUpError) as failed:
            await episode.ready()
        await ended(episode)
        assert episode.state.ending is Ending.SET_UP_FAILED
        verdict = await episode.evaluate()
        assert (verdict.status, verdict.reward) == ("set_up_failed", None)
    return failed.value


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (RunReply(exit_code=3, stderr="no such table"), "failed (exit code 3): no such table"),
        (RunReply(timed_out=True), "took longer than 7 s"),
    ],
)
async def test_a_preprocess_that_fails_is_reported_with_its_output_or_its_deadline(
    tmp_path: Path, reply: RunReply, message: str
) -> None:
    suite = suite_with(tmp_path, deadlines={"preprocess_seconds": 7})
    provider = FakeProvider(tools=TOOLS, run=lambda request: reply)
    error = await set_up_error(tmp_path, provider, "made-answer", suite=suite)
    assert error.message == f"preprocess {message}"


async def test_a_failed_preprocess_that_the_suite_ignores_is_in_the_trajectory_and_in_the_verdict(
    tmp_path: Path,
) -> None:
    def run(request: FakeRun) -> RunReply:
        is_preprocess = any("preprocess" in argument for argument in request.argv)
        return RunReply(exit_code=3, stderr="no such table") if is_preprocess else RunReply(exit_code=0)

    suite = suite_with(tmp_path, preprocess_must_succeed=False)
    provider = FakeProvider(tools=TOOLS, run=run)
    async with running_registry(tmp_path, provider, suite=suite) as registry:
        episode = registry.start("made-answer", PLAYER)
        verdict = await episode.evaluate()
        other = await registry.start("find-answer", PLAYER).evaluate()
    failure = "preprocess failed (exit code 3): no such table"
    assert (verdict.status, verdict.preprocess_failure) == ("scored", failure)
    failures = events(episode.files.folder, "preprocess_failed")
    assert [event["failure"] for event in failures] == [failure]
    assert "preprocess_failure" not in other.to_json()


async def test_a_server_that_does_not_start_is_named_with_its_stderr(tmp_path: Path) -> None:
    faults = Faults(servers_that_fail={"probe": "the licence has run out"})
    error = await set_up_error(tmp_path, FakeProvider(tools=TOOLS, faults=faults), "find-answer")
    assert "the licence has run out" in error.message
    assert error.data["server"] == "probe"


async def test_a_set_up_that_never_finishes_is_ended_at_its_deadline(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS, faults=Faults(silent_on="start"))
    error = await set_up_error(tmp_path, provider, "find-answer", set_up_seconds=0.2)
    assert error.message == "the set-up of find-answer took longer than 0.2 s"


ELSEWHERE = (
    "/tmp/answer",
    "/var/tmp/answer",
    "/dev/shm/answer",
    "/root/answer",
    "/opt/answer",
    "/workspace/utils/answer",
    "/workspace/configs/answer",
    "/workspace/answer",
    "/workspace/tasks/answer",
    "/workspace/tasks/probe/made-answer/draft",
    "/workspace/tasks/probe/made-answer/groundtruth_workspace/answer",
)


def leaves_answers(*paths: str, background: int = 0) -> Callable[[FakeRun], RunReply]:
    """A `run` in which preprocess writes to the workspace, and the answer to these paths."""

    def run(request: FakeRun) -> RunReply:
        if "--agent_workspace" not in request.argv or "preprocess" not in str(request.argv):
            return RunReply()
        workspace = request.argv[request.argv.index("--agent_workspace") + 1]
        request.tree.write(f"{workspace}/deep/input.txt", "six times seven", mode=0o750)
        for path in paths:
            request.tree.write(path.replace("/workspace", request.cwd), "42")
        return RunReply(background=background)

    return run


async def test_only_the_workspace_of_preprocess_reaches_the_agents_sandbox(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS, run=leaves_answers(*ELSEWHERE))
    async with running_registry(tmp_path, provider) as registry:
        episode = registry.start("made-answer", PLAYER)
        await episode.ready()
        _, agent = provider.opened
        workspace = agent.root / episode.sandbox_factory.suite.profile.workspace
        assert agent.tree.text(workspace / "deep/input.txt") == "six times seven"
        assert [path for path in agent.tree.below("/") if "answer" in path.name or "draft" in path.name] == [
            agent.root / episode.spec.task.folder
        ]


async def test_kept_entries_of_the_tasks_folder_reach_the_agents_sandbox(tmp_path: Path) -> None:
    folder = "/workspace/tasks/probe/made-answer"
    suite = suite_with(tmp_path, tasks={"made-answer": {"kept": ["pages", "evaluation"]}})
    run = leaves_answers(f"{folder}/pages/index.html", f"{folder}/draft", f"{folder}/evaluation/new.py")
    provider = FakeProvider(tools=TOOLS, run=run)
    async with running_registry(tmp_path, provider, suite=suite) as registry:
        episode = registry.start("made-answer", PLAYER)
        await episode.ready()
        _, agent = provider.opened
        place = agent.root / episode.spec.task.folder
        assert [str(path.relative_to(place)) for path in agent.tree.below(place)] == [
            ".",
            "pages",
            "pages/index.html",
        ]


async def test_a_preprocess_that_leaves_processes_running_keeps_its_sandbox(tmp_path: Path) -> None:
    suite = suite_with(tmp_path, tasks={"made-answer": {"leaves_running": True}})
    provider = FakeProvider(tools=TOOLS, run=leaves_answers("/tmp/answer", background=1))
    async with running_registry(tmp_path, provider, suite=suite) as registry:
        episode = registry.start("made-answer", PLAYER)
        await episode.ready()
        (sandbox,) = provider.opened
        workspace = sandbox.root / episode.sandbox_factory.suite.profile.workspace
        assert sandbox.tree.text(workspace / "deep/input.txt") == "six times seven"
        assert "/tmp/answer" not in sandbox.tree


@pytest.mark.parametrize("settings", [{"in_place": True}, {"preprocess_sandbox": "snapshot"}], ids=str)
async def test_preprocess_can_run_in_the_agents_sandbox(tmp_path: Path, settings: dict[str, Any]) -> None:
    suite = suite_with(tmp_path, tasks={"made-answer": settings})
    provider = FakeProvider(tools=TOOLS, run=leaves_answers("/tmp/answer"))
    async with running_registry(tmp_path, provider, suite=suite) as registry:
        episode = registry.start("made-answer", PLAYER)
        await episode.ready()
        (sandbox,) = provider.opened
        assert sandbox.spec.name == f"{episode.spec.public_id}-agent"
        assert "/tmp/answer" not in sandbox.tree


async def test_changes_that_cannot_be_explained_fail_the_set_up_and_are_named(tmp_path: Path) -> None:
    suite = suite_with(tmp_path, tasks={"made-answer": {"leaves_running": True}})
    files = [f"/opt/answer-{number:02}" for number in range(11)]
    provider = FakeProvider(tools=TOOLS, run=leaves_answers(*files, background=1))
    error = await set_up_error(tmp_path, provider, "made-answer", suite=suite)
    # The folder /opt is new as well.
    assert error.message == (
        f"preprocess left changes that the agent could read: /opt, {', '.join(files[:9])} and 2 more. "
        "It may only change the workspace and its task's folder"
    )


@pytest.mark.parametrize("way", ["own", "snapshot"])
async def test_answers_that_are_left_fail_the_set_up(tmp_path: Path, way: str) -> None:
    # Inside of an entry that is kept; the other content of the task's folder is removed anyway.
    run = leaves_answers("/workspace/tasks/probe/made-answer/pages/groundtruth_workspace/answer.txt")
    suite = suite_with(tmp_path, tasks={"made-answer": {"preprocess_sandbox": way, "kept": ["pages"]}})
    error = await set_up_error(tmp_path, FakeProvider(tools=TOOLS, run=run), "made-answer", suite=suite)
    assert error.message.startswith("the answers could not be sealed: ")


async def test_a_workspace_over_the_limit_fails_the_set_up(tmp_path: Path) -> None:
    def run(request: FakeRun) -> int:
        request.tree.write(f"{request.argv[-3]}/big", b"x" * (2 << 20))
        return 0

    error = await set_up_error(tmp_path, FakeProvider(tools=TOOLS, run=run), "made-answer", workspace_mib=1)
    assert error.message == (
        "what preprocess left cannot be copied to the agent's sandbox: "
        "the files in the sandbox exceed the limit of 1048576 bytes"
    )


async def test_tokens_that_cannot_be_read_fail_the_set_up(tmp_path: Path) -> None:
    suite = suite_with(tmp_path)
    (suite / "configs" / "token_key_session.py").write_text('all_token_key_session = {"probe_key": "x"}\n')
    server = suite / "configs" / "mcp_servers" / "probe.yaml"
    text = server.read_text()
    assert "params:\n" in text
    server.write_text(text.replace("params:\n", 'params:\n  env: {PROBE_KEY: "${token.probe_key}"}\n'))
    provider = FakeProvider(
        tools=TOOLS, run=lambda request: RunReply(exit_code=1, stderr="SyntaxError in token_key_session.py")
    )
    error = await set_up_error(tmp_path, provider, "find-answer", suite=suite)
    assert error.message == "the suite's tokens could not be read: SyntaxError in token_key_session.py"


async def test_preprocess_runs_in_a_sandbox_that_is_removed_before_the_agents_opens(tmp_path: Path) -> None:
    open_at_preprocess: list[str] = []

    def run(request: FakeRun) -> int:
        open_at_preprocess.extend(provider.machine.sandboxes)
        return 0

    provider = FakeProvider(tools=TOOLS, run=run)
    async with running_registry(tmp_path, provider) as registry:
        episode = registry.start("made-answer", PLAYER)
        await episode.ready()
        label = episode.spec.public_id
        assert open_at_preprocess == [f"{label}-preprocess"]
        assert list(provider.machine.sandboxes) == [f"{label}-agent"]
        assert [sandbox.spec.image for sandbox in provider.opened] == ["fake", "sha256:fake"]
