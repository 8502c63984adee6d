"""Runs the programs of `docs/trainers.md` and `docs/verifiers.md`, each in its own virtual environment.

Not collected by default, because it installs gigabytes. Run it by name:

    python -m pytest tests/trainers/trainers.py

The model is a fake that plays the tasks' oracles.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs import snippets
from tests.docs.pages import REPOSITORY
from tests.docs.snippets import INSTALL_SECONDS
from tests.probe.serving import Served
from tests.trainers.conftest import THOUGHT, Trial

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(2 * INSTALL_SECONDS)]

PAGE = "docs/trainers.md"
VERIFIERS = "docs/verifiers.md"


def episodes_of(served: Served) -> set[Path]:
    """The trajectories of the server."""
    return set((served.state / "episodes").glob("*/trajectory.jsonl"))


def assert_thoughts_stand_before_calls(trajectories: set[Path]) -> None:
    """Each of these episodes that was played has the model's text at each turn."""
    played = 0
    for file in trajectories:
        lines = [json.loads(line) for line in file.read_bytes().splitlines()]
        calls = sum(line["event"] == "call" for line in lines)
        notes = [(line["calls"], line["text"]) for line in lines if line["event"] == "note"]
        if calls:  # TRL opens some to list their tools
            played += 1
            # The last one is beside the claim.
            assert [note for note in notes if note[1] == THOUGHT] == [(n, THOUGHT) for n in range(calls + 1)]
    assert played


def verifiers_traces(folder: Path) -> str:
    """The log of verifiers, whose two rollouts have the reward 1."""
    (traces,) = (folder / "outputs").rglob("traces.jsonl")
    text = traces.read_text("utf-8")
    assert text.count('"score":1.0') == 2
    return text


async def test_verifiers_programs_get_the_expected_rewards(trial: Trial) -> None:
    await trial.install(f"{REPOSITORY}[verifiers]")
    before = episodes_of(trial.served)
    lines = await trial.block(VERIFIERS, "A program", "python")
    assert sorted(lines) == ["audit-expenses True 0.93 1.0"] * 2 + ["tune-reactor True 0.95 1.0"] * 2
    assert_thoughts_stand_before_calls(episodes_of(trial.served) - before)
    await trial.block(VERIFIERS, "From the command line", "sh")
    verifiers_traces(trial.folder)
    lines = await trial.program("verifiers_limits.py", trial.served.url, trial.model)
    assert lines == ["truncated 0.0", "no task, no reward"]


async def test_verifiers_other_harnesses_play_at_the_episodes_address(trial: Trial) -> None:
    await trial.install(f"{REPOSITORY}[verifiers]", "uv")
    await trial.block(VERIFIERS, "Other harnesses", "sh")
    text = verifiers_traces(trial.folder)
    assert "toolathlon_claim_done" in text
    assert "toolathlon_evaluate" not in text


async def test_the_hubs_package_is_complete_and_found_by_verifiers(trial: Trial) -> None:
    # The hub gets a wheel and an archive, as the hub's own client makes them from the folder.
    (trial.folder / "hub").mkdir()
    trial.use(await snippets.install(trial.folder / "hub", "prime", "uv"))
    source = trial.folder / "source"
    assert await trial.program("hub_archive.py", source) == ["tool-decathlon 0.1.0 VERIFIERS_V1"]
    await trial.install(str(source))
    await trial.block(VERIFIERS, "From the command line", "sh")
    verifiers_traces(trial.folder)


async def test_inspect_ai_command_gets_the_expected_rewards(trial: Trial) -> None:
    await trial.install(f"{REPOSITORY}[inspect]", "openai")
    before = episodes_of(trial.served)
    await trial.block(PAGE, "inspect-ai", "bash")
    ((log,),) = map(json.loads, await trial.program("inspect_logs.py", "logs"))
    assert (log["status"], len(log["samples"])) == ("success", 4)
    (reward,) = (score for score in log["results"]["scores"] if score["name"] == "reward")
    assert reward["metrics"]["mean"]["value"] == 1.0
    assert log["samples"][0]["scores"]["reward"]["metadata"]["status"] == "scored"
    assert_thoughts_stand_before_calls(episodes_of(trial.served) - before)


async def test_nemo_gym_commands_get_the_expected_rewards(trial: Trial, python_3_12: str) -> None:
    # `gym` has uv make an environment for each of its servers, with the same Python.
    await trial.install(f"{REPOSITORY}[nemo-gym]", "uv", python=python_3_12)
    before = episodes_of(trial.served)
    await trial.block(PAGE, "NeMo Gym", "bash")
    text = (trial.folder / "rollouts.jsonl").read_text("utf-8")
    samples = [json.loads(line) for line in text.splitlines()]
    rewards = [(sample["task"], sample["reward"], sample["metric/success"]) for sample in samples]
    assert sorted(rewards) == [("audit-expenses", 1.0, 1.0)] * 2 + [("tune-reactor", 1.0, 1.0)] * 2
    assert_thoughts_stand_before_calls(episodes_of(trial.served) - before)
    assert await trial.program("nemo_gym_limits.py", trial.served.url) == [
        "truncated 0.0",
        "no verdict, no reward",
        "no session, no reward",
        "abandoned, closed",
    ]


@dataclass(frozen=True)
class Case:
    """A program of the page, and what it prints. `driver`: the program that runs it as its trainer does."""

    heading: str
    packages: tuple[str, ...]
    output: tuple[str, ...]
    driver: tuple[str, ...] = ()
    sends_notes: bool = False
    needs_3_12: bool = False


OURS = str(REPOSITORY)
AUDIT, TUNE = "audit-expenses", "tune-reactor"
NO_REWARD = "no task, no reward"
VERL = ("verl", "cachetools", "fastapi", "uvicorn", "openai")  # some are undeclared
CASES = (
    Case("openai-agents", (f"{OURS}[openai-agents]",), (f"{AUDIT} 1.0 8", f"{TUNE} 1.0 6"), sends_notes=True),
    Case("TRL", (f"{OURS}[trl]", "openai"), (f"{AUDIT} 1.0, {TUNE} 1.0",), ("trl_training.py",), True),
    Case("openenv", (f"{OURS}[openenv]", "openai"), ("[1.0, 1.0]",), sends_notes=True),
    Case("ART", (OURS, "openpipe-art"), (f"{AUDIT} [1.0, 1.0]", f"{TUNE} [1.0, 1.0]"), needs_3_12=True),
    Case(
        "SkyRL-gym",
        (OURS, "skyrl-gym", "openai"),
        ("[(1.0, 6), (1.0, 8), (0.0, 2)]", NO_REWARD),
        ("skyrl_rollouts.py",),
    ),
    Case("Atropos", (OURS, "atroposlib"), ("[1.0, 1.0] [128, 128]",) * 2, ("atropos_groups.py",)),
    Case("verl", (OURS, *VERL), ("[1.0, 1.0, 0.0]", NO_REWARD), ("verl_rollouts.py",)),
)


@pytest.mark.parametrize("case", CASES, ids=[case.heading for case in CASES])
async def test_a_trainers_program_gets_the_expected_rewards(
    case: Case, trial: Trial, request: pytest.FixtureRequest
) -> None:
    python = request.getfixturevalue("python_3_12") if case.needs_3_12 else sys.executable
    await trial.install(*case.packages, python=python)
    before = episodes_of(trial.served)
    output = await trial.block(PAGE, case.heading, "python", *case.driver)
    lines = [line for line in output if line.startswith(case.output)]
    assert sorted(lines) == sorted(case.output)
    if case.sends_notes:
        assert_thoughts_stand_before_calls(episodes_of(trial.served) - before)
