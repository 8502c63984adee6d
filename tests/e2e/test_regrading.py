"""Attempts that are kept and graded again: a changed evaluator changes the verdict, and nothing else does."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.app import bootstrap
from decathlon_mcp.errors import DecathlonError, UnknownTaskError
from decathlon_mcp.grading.signing import verdict_digest
from decathlon_mcp.plugins.regrade.regrading import Regraded, Regrader, read_kept
from decathlon_mcp.settings import read_settings
from tests.probe.clients import Player, playing
from tests.probe.serving import SUITE, folder_of, serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LOG_EVALUATOR = """
import json, sys
log = json.load(open(sys.argv[sys.argv.index("--res_log_file") + 1]))
launch_time = sys.argv[sys.argv.index("--launch_time") + 1]
roles = [message["role"] for message in log["messages"]]
answer = log["messages"][-1]["content"]
names = [call["function"]["name"] for m in log["messages"] for call in m.get("tool_calls", ())]
tools = {tool["function"]["name"] for tool in log["tool_calls"]["tools"]}
print(json.dumps([roles, answer, names, sorted(tools), log["key_stats"]["tool_calls"], launch_time,
                  log["config"]["launch_time"], log["config"]["task_str"][:20]]))
sys.exit(0 if answer == "WORD" else 1)
"""


@dataclass
class Checkout:
    """A copy of the probe suite, the state folder of its servers, and the provider that they use."""

    suite: Path
    state: Path
    provider: str

    def task(self, name: str) -> Path:
        return self.suite / "tasks" / "probe" / name

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.suite / "tasks" / "probe" / file
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))

    @property
    def settings(self) -> dict[str, Any]:
        return {"suite": (str(self.suite),), "provider": self.provider, "isolation": "none"}

    async def play(self, task: str, *, answer: str | None = None, **files: str) -> dict[str, Any]:
        """Play a task on a server of its own: write these files, claim, and return the verdict."""
        async with self.playing(task) as player:
            for name, text in files.items():
                await player.call("probe__write", path=name, text=text)
            await player.call("claim_done", **({"answer": answer} if answer else {}))
            return (await player.call("evaluate")).structured_content

    @asynccontextmanager
    async def playing(self, task: str, **settings: Any) -> AsyncGenerator[Player]:
        values: dict[str, Any] = {**self.settings, "keep": "workspace", **settings}
        async with serving(self.state, **values) as served, playing(served, task, "task") as player:
            yield player

    def folder(self, verdict: dict[str, Any]) -> Path:
        return folder_of(self.state, verdict["episode"])

    async def regrade(self, verdict: dict[str, Any], **settings: Any) -> Regraded:
        folder = self.folder(verdict)
        values = {**self.settings, "state": self.state, **settings}
        async with bootstrap(read_settings(values)) as registry:
            return await Regrader(registry).regrade(folder, read_kept(folder))


@pytest.fixture
def checkout(provider: str, tmp_path: Path) -> Checkout:
    suite = tmp_path / "suite"
    shutil.copytree(SUITE, suite)
    return Checkout(suite, tmp_path / "state", provider)


def outcome(regraded: Regraded) -> tuple[str, bool | None, float | None]:
    return regraded.after.status, regraded.after.success, regraded.after.reward


async def test_a_changed_evaluator_changes_the_verdict_and_back(checkout: Checkout) -> None:
    main = "find-answer/evaluation/main.py"
    verdict = await checkout.play("find-answer", **{"answer.txt": "wrong"})
    assert verdict["reward"] == 0.0
    checkout.replace(main, "answer == expected else 1", "answer == 'wrong' else 1")
    passed = await checkout.regrade(verdict)
    assert outcome(passed) == ("scored", True, 1.0)
    checkout.replace(main, "answer == 'wrong' else 1", "answer == expected else 1")
    failed = await checkout.regrade(verdict)
    assert outcome(failed) == ("scored", False, 0.0)
    digests = [verdict["evaluator_digest"], passed.after.evaluator_digest, failed.after.evaluator_digest]
    assert digests[0] == digests[2] != digests[1]


async def test_an_unchanged_checkout_gives_the_same_verdict(checkout: Checkout) -> None:
    verdict = await checkout.play("made-answer", **{"answer.txt": "made-by-preprocess"})
    assert verdict["reward"] == 1.0
    regraded = await checkout.regrade(verdict)
    assert regraded.before is not None
    assert regraded.before.to_json() == verdict
    after = regraded.after.to_json()
    assert after["regrading"] == {
        "verdict": verdict_digest(verdict),
        "suite_revision": verdict["suite_revision"],
    }
    different = {name for name in after if after[name] != verdict.get(name)}
    assert different == {"regrading", "scored_at", "seconds", "signature"}


async def test_the_verdict_before_is_that_of_the_row_and_not_of_the_file(checkout: Checkout) -> None:
    played = await checkout.play("find-answer", **{"answer.txt": "wrong"})
    file = checkout.folder(played) / "verdict.json"
    for other in (json.dumps({**played, "reward": 1.0, "success": True}), "{}", None):
        if other is None:
            file.unlink()
        else:
            file.write_text(other)
        regraded = await checkout.regrade(played)
        assert regraded.before is not None
        assert regraded.before.to_json() == played


async def test_a_new_evaluator_reads_the_groundtruth_that_preprocess_made(checkout: Checkout) -> None:
    verdict = await checkout.play("made-answer", **{"answer.txt": "MADE-BY-PREPROCESS"})
    assert verdict["reward"] == 0.0
    checkout.replace("made-answer/evaluation/main.py", ".strip() if", ".strip().lower() if")
    # The suite's own file at the same place does not replace it.
    (checkout.task("made-answer") / "groundtruth_workspace" / "answer.txt").write_text("edited")
    assert outcome(await checkout.regrade(verdict)) == ("scored", True, 1.0)


async def test_a_changed_rubric_changes_the_reward_and_not_the_success(checkout: Checkout) -> None:
    verdict = await checkout.play("dense", **{"a.txt": ""})
    assert (verdict["success"], verdict["reward"]) == (False, 0.75)
    checkout.replace("dense/evaluation/rubric.yaml", "first: 0.5", "first: 3")
    checkout.replace("dense/evaluation/evaluator.py", '"second": (', '"third": True, "second": (')
    regraded = await checkout.regrade(verdict)
    assert outcome(regraded) == ("scored", False, 3.25)
    assert regraded.after.metrics == {**verdict["metrics"], "third": 1.0}
    assert regraded.after.weights["first"] == 3.0


async def test_the_evaluator_reads_the_same_log_answer_and_launch_time(checkout: Checkout) -> None:
    main = checkout.task("find-answer") / "evaluation" / "main.py"
    main.write_text(LOG_EVALUATOR)
    verdict = await checkout.play("find-answer", answer="forty-two", a="1", b="2")
    main.write_text(LOG_EVALUATOR.replace("WORD", "forty-two"))
    regraded = await checkout.regrade(verdict)
    assert outcome(regraded) == ("scored", True, 1.0)
    assert json.loads(regraded.after.evaluator_output) == json.loads(verdict["evaluator_output"])
    roles, answer, names, tools, calls, *_ = json.loads(regraded.after.evaluator_output)
    assert (roles[0], answer, names, calls) == ("user", "forty-two", ["probe-write"] * 2, 2)
    assert "probe-shell" in tools


async def test_what_the_first_grading_refused_is_refused_again_and_nothing_else(checkout: Checkout) -> None:
    async with checkout.playing("find-answer") as player:
        links = 'echo 42 > 42; ln -s "$PWD/42" answer.txt; ln -s /etc/passwd users'
        await player.call("probe__shell", command=f"{links}; mkfifo pipe")
        await player.call("claim_done")
        verdict = (await player.call("evaluate")).structured_content
    assert (len(verdict["refused"]), verdict["reward"]) == (2, 1.0)
    after = (await checkout.regrade(verdict)).after
    assert (list(after.refused), after.reward) == (verdict["refused"], 1.0)


async def test_a_task_that_cannot_be_found_or_repeated_is_an_error(checkout: Checkout) -> None:
    verdict = await checkout.play("find-answer")
    suite_file = checkout.suite / "suite.yaml"
    settings = suite_file.read_text()
    folder = checkout.task("find-answer")

    async def error(**settings: Any) -> DecathlonError:
        with pytest.raises(DecathlonError) as raised:
            await checkout.regrade(verdict, **settings)
        return raised.value

    suite_file.write_text(settings + "  find-answer: {in_place: true}\n")
    assert "graded in the agent's own sandbox" in (await error()).message
    suite_file.write_text(settings + "conflicts: [[find-answer, dense]]\n")
    assert "of which nothing is kept" in (await error()).message
    suite_file.write_text(settings.replace("name: probe", "name: other"))
    renamed = await error()
    assert isinstance(renamed, UnknownTaskError)
    assert renamed.message == "it was played in the suite 'probe', and --suite gives other"
    suite_file.write_text(settings)
    shutil.move(folder, checkout.suite / "find-answer")
    assert (await error()).message == "the suite probe has no task 'find-answer' any more"
    shutil.move(checkout.suite / "find-answer", folder)
    if checkout.provider == "docker":
        assert "it was played in a container" in (await error(provider="host")).message
    assert (await checkout.regrade(verdict)).after.status == "scored"
