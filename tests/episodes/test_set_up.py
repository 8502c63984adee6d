"""Set-up of a task: its steps, its failures, and the removal of the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.errors import SetUpError
from tests.episodes.environment import TOOLS, ended, running_registry, suite_with
from tests.fakes.driver import FakeRun, Faults, RunReply
from tests.fakes.provider import FakeProvider
from tests.probe.serving import SUITE

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


async def test_the_workspace_is_filled_and_the_answers_are_removed(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS)
    async with running_registry(tmp_path, provider) as registry:
        episode = registry.start("find-answer", PLAYER)
        await episode.ready()
        (sandbox,) = provider.opened
        workspace = sandbox.root / episode.sandbox_factory.suite.profile.workspace
        task_folder = sandbox.root / episode.spec.task.folder
        assert sandbox.tree.text(workspace / "question.txt") == "six times seven\n"
        for name in ("evaluation", "groundtruth_workspace", "docs", "task_config.json"):
            assert task_folder / name not in sandbox.tree


async def test_preprocess_sees_the_answers_and_is_told_the_workspace_and_the_launch_time(
    tmp_path: Path,
) -> None:
    requests: list[FakeRun] = []

    def run(request: FakeRun) -> int:
        root = Path(request.cwd)
        answers = root / "tasks" / "probe" / "made-answer" / "groundtruth_workspace" / "answer.txt"
        assert request.tree.text(str(answers))
        requests.append(request)
        return 0

    provider = FakeProvider(tools=TOOLS, run=run)
    async with running_registry(tmp_path, provider) as registry:
        await registry.start("made-answer", PLAYER).ready()
    (request,) = requests
    assert "tasks.probe.made-answer.preprocess.main" in request.argv
    assert request.argv[-4::2] == ("--agent_workspace", "--launch_time")


async def test_a_preprocess_that_fails_is_reported_with_its_output(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS, run=lambda request: RunReply(exit_code=3, stderr="no such table"))
    error = await set_up_error(tmp_path, provider, "made-answer")
    assert error.message == "preprocess failed (exit code 3): no such table"


async def test_a_preprocess_that_takes_too_long_is_reported_with_its_deadline(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS, run=lambda request: RunReply(timed_out=True))
    error = await set_up_error(tmp_path, provider, "made-answer", preprocess_seconds=7)
    assert error.message == "preprocess took longer than 7 s"


async def test_a_server_that_does_not_start_is_named_with_its_stderr(tmp_path: Path) -> None:
    faults = Faults(servers_that_fail={"probe": "the licence has run out"})
    error = await set_up_error(tmp_path, FakeProvider(tools=TOOLS, faults=faults), "find-answer")
    assert "the licence has run out" in error.message
    assert error.data["server"] == "probe"


async def test_a_set_up_that_never_finishes_is_ended_at_its_deadline(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS, faults=Faults(silent_on="start"))
    error = await set_up_error(tmp_path, provider, "find-answer", set_up_seconds=0.2)
    assert error.message == "the set-up of find-answer took longer than 0.2 s"


async def test_answers_that_are_left_fail_the_set_up(tmp_path: Path) -> None:
    def run(request: FakeRun) -> int:
        # Outside of the task's own folder, whose content is removed anyway.
        request.tree.write(f"{request.cwd}/tasks/probe/groundtruth_workspace/answer.txt", "42")
        return 0

    error = await set_up_error(tmp_path, FakeProvider(tools=TOOLS, run=run), "made-answer")
    assert error.message.startswith("the answers could not be sealed: ")


async def test_what_preprocess_leaves_in_the_tasks_folder_is_removed_too(tmp_path: Path) -> None:
    def run(request: FakeRun) -> int:
        request.tree.write(f"{request.cwd}/tasks/probe/made-answer/draft.txt", "42")
        return 0

    provider = FakeProvider(tools=TOOLS, run=run)
    async with running_registry(tmp_path, provider) as registry:
        episode = registry.start("made-answer", PLAYER)
        await episode.ready()
        (sandbox,) = provider.opened
        assert sandbox.root / episode.spec.task.folder / "draft.txt" not in sandbox.tree


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


async def test_two_tools_of_one_name_fail_the_set_up(tmp_path: Path) -> None:
    async def claim_done(call: object) -> str:
        return ""

    provider = FakeProvider(tools={"probe": {"claim_done": claim_done}})
    async with running_registry(tmp_path, provider, names="raw") as registry:
        with pytest.raises(SetUpError, match="two tools are called 'claim_done'"):
            await registry.start("find-answer", PLAYER).ready()
