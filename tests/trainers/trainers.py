"""Runs the programs of `docs/trainers.md` and `docs/verifiers.md`, each in its own virtual environment.

Not collected by default, because it installs gigabytes. Run it by name:

    python -m pytest tests/trainers/trainers.py

The model is a fake that plays the tasks' oracles (`oracles.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from tests.docs import snippets
from tests.docs.pages import REPOSITORY, block
from tests.docs.snippets import run
from tests.driver.conftest import find_python
from tests.probe.serving import Served, serving
from tests.trainers.oracles import THOUGHT, oracles

INSTALL_SECONDS = 1800
pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(2 * INSTALL_SECONDS)]

PAGE = "docs/trainers.md"
VERIFIERS = "docs/verifiers.md"
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    state = tmp_path_factory.mktemp("state")
    async with serving(state, suite=("starter",), provider="host", isolation="auto", max_opening=2) as served:
        yield served


@pytest.fixture(scope="module")
def model() -> Iterator[dict[str, str]]:
    """Environment variables with the address of the fake model."""
    with oracles() as url:
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
        yield {**variables, "PYTHONPATH": ""}  # use the installed package, not the checkout


@pytest.fixture(autouse=True)
def raised_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limit: importing torch alone can take a minute."""
    monkeypatch.setattr(snippets, "TIMEOUT_SECONDS", 900)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for one trainer. Its virtual environments are removed after the test."""
    yield tmp_path
    for environments in ("venv", "resources_servers"):
        shutil.rmtree(tmp_path / environments, ignore_errors=True)


async def install(folder: Path, *packages: str, python: str = sys.executable) -> Path:
    """Install packages in a new virtual environment and return the folder of its programs."""
    programs = folder / "venv" / "bin"
    with anyio.fail_after(INSTALL_SECONDS):
        await anyio.run_process([python, "-m", "venv", str(folder / "venv")])
        command = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        await anyio.run_process([*command, *packages])
    return programs


@pytest.fixture(scope="module")
def python_3_12() -> str:
    """Python 3.12, which some trainers require."""
    python = find_python("3.12")
    if python is None:
        pytest.skip("no Python 3.12 here, neither on the PATH nor in pyenv")
    return python


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


async def test_verifiers_programs_get_the_expected_rewards(
    served: Served, model: dict[str, str], folder: Path
) -> None:
    programs = await install(folder, f"{REPOSITORY}[verifiers]")
    before = episodes_of(served)
    page, python = VERIFIERS, [programs / "python"]
    output = await run(
        block(page, "A program", "python"), python, url=served.url, folder=folder, environment=model
    )
    assert (
        sorted(output.splitlines())
        == ["audit-expenses True 0.93 1.0"] * 2 + ["tune-reactor True 0.95 1.0"] * 2
    )
    assert served.episodes.live == []
    assert_thoughts_stand_before_calls(episodes_of(served) - before)
    path = {**model, "PATH": f"{programs}:/usr/bin:/bin"}
    command = block(page, "From the command line", "sh")
    await run(command, ["bash"], url=served.url, folder=folder, environment=path)
    (traces,) = (folder / "outputs").rglob("traces.jsonl")
    assert traces.read_text("utf-8").count('"score":1.0') == 2
    program = PROGRAMS / "verifiers_limits.py"
    result = await anyio.run_process(
        [str(programs / "python"), str(program), served.url, model["OPENAI_BASE_URL"]]
    )
    assert result.stdout.decode().splitlines() == ["truncated 0.0", "no task, no reward"]
    assert served.episodes.live == []


async def test_verifiers_other_harnesses_play_at_the_episodes_address(
    served: Served, model: dict[str, str], folder: Path
) -> None:
    programs = await install(folder, f"{REPOSITORY}[verifiers]", "uv")
    path = {**model, "PATH": f"{programs}:/usr/bin:/bin"}
    command = block(VERIFIERS, "Other harnesses", "sh")
    await run(command, ["bash"], url=served.url, folder=folder, environment=path)
    (traces,) = (folder / "outputs").rglob("traces.jsonl")
    text = traces.read_text("utf-8")
    assert text.count('"score":1.0') == 2
    assert "toolathlon_claim_done" in text
    assert "toolathlon_evaluate" not in text
    assert served.episodes.live == []


async def test_the_hubs_package_is_complete_and_found_by_verifiers(
    served: Served, model: dict[str, str], folder: Path
) -> None:
    # The hub gets a wheel and an archive, as the hub's own client makes them from the folder.
    tools = await install(folder / "hub", "prime", "uv")
    result = await anyio.run_process(
        [str(tools / "python"), str(PROGRAMS / "hub_archive.py"), str(folder / "source")]
    )
    assert result.stdout.decode().splitlines() == ["tool-decathlon 0.1.0 VERIFIERS_V1"]
    programs = await install(folder, str(folder / "source"))
    path = {**model, "PATH": f"{programs}:/usr/bin:/bin"}
    command = block(VERIFIERS, "From the command line", "sh")
    await run(command, ["bash"], url=served.url, folder=folder, environment=path)
    (traces,) = (folder / "outputs").rglob("traces.jsonl")
    assert traces.read_text("utf-8").count('"score":1.0') == 2
    assert served.episodes.live == []


async def test_inspect_ai_command_gets_the_expected_rewards(
    served: Served, model: dict[str, str], folder: Path
) -> None:
    programs = await install(folder, f"{REPOSITORY}[inspect]", "openai")
    path = {**model, "PATH": f"{programs}:/usr/bin:/bin"}
    before = episodes_of(served)
    command = block(PAGE, "inspect-ai", "bash")
    await run(command, ["bash"], url=served.url, folder=folder, environment=path)
    result = await anyio.run_process(
        [str(programs / "python"), str(PROGRAMS / "inspect_log.py"), str(folder / "logs")]
    )
    (log,) = json.loads(result.stdout)
    assert (log["status"], len(log["samples"])) == ("success", 4)
    assert ["reward", None, "mean", 1.0] in log["results"]
    assert log["samples"][0]["scores"]["reward"][2]["status"] == "scored"
    assert served.episodes.live == []
    assert_thoughts_stand_before_calls(episodes_of(served) - before)


async def test_nemo_gym_commands_get_the_expected_rewards(
    served: Served, model: dict[str, str], folder: Path, python_3_12: str
) -> None:
    programs = await install(folder, f"{REPOSITORY}[nemo-gym]", "uv", python=python_3_12)
    before = episodes_of(served)
    # `gym` has uv make an environment for each of its servers, with the same Python.
    path = {**model, "PATH": f"{programs}:{Path(python_3_12).parent}:{os.environ['PATH']}"}
    commands = block(PAGE, "NeMo Gym", "bash")
    await run(commands, ["bash"], url=served.url, folder=folder, environment=path)
    samples = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text("utf-8").splitlines()]
    rewards = [(sample["task"], sample["reward"], sample["metric/success"]) for sample in samples]
    assert sorted(rewards) == [("audit-expenses", 1.0, 1.0)] * 2 + [("tune-reactor", 1.0, 1.0)] * 2
    assert served.episodes.live == []
    assert_thoughts_stand_before_calls(episodes_of(served) - before)
    result = await anyio.run_process(
        [str(programs / "python"), str(PROGRAMS / "nemo_gym_limits.py"), served.url],
        env={**os.environ, **path},
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.decode().splitlines() == [
        "truncated 0.0",
        "no verdict, no reward",
        "no session, no reward",
        "abandoned, closed",
    ]
    assert served.episodes.live == []


@dataclass(frozen=True)
class Case:
    """A program of the page, and what it prints. `driver`: the program that runs it as its trainer does."""

    heading: str
    packages: tuple[str, ...]
    output: tuple[str, ...]
    driver: str = ""
    sends_notes: bool = False
    needs_3_12: bool = False
    variables: tuple[tuple[str, str], ...] = ()


VERL = ("verl", "cachetools", "fastapi", "uvicorn", "openai")  # some are undeclared
CASES = (
    Case(
        "openai-agents",
        (f"{REPOSITORY}[openai-agents]",),
        ("audit-expenses 1.0 8", "tune-reactor 1.0 6"),
        sends_notes=True,
    ),
    Case(
        "TRL",
        (f"{REPOSITORY}[trl]", "openai"),
        ("audit-expenses 1.0, tune-reactor 1.0",),
        "trl_training.py",
        sends_notes=True,
    ),
    Case("openenv", (f"{REPOSITORY}[openenv]", "openai"), ("[1.0, 1.0]",), sends_notes=True),
    Case(
        "ART",
        (str(REPOSITORY), "openpipe-art"),
        ("audit-expenses [1.0, 1.0]", "tune-reactor [1.0, 1.0]"),
        needs_3_12=True,
    ),
    Case(
        "SkyRL-gym",
        (str(REPOSITORY), "skyrl-gym", "openai"),
        ("[(1.0, 6), (1.0, 8), (0.0, 2)]", "no task, no reward"),
        "skyrl_rollouts.py",
    ),
    Case(
        "Atropos",
        (str(REPOSITORY), "atroposlib"),
        ("[1.0, 1.0] [128, 128]", "[1.0, 1.0] [128, 128]"),
        "atropos_groups.py",
        variables=(("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1"),),
    ),
    Case("verl", (str(REPOSITORY), *VERL), ("[1.0, 1.0, 0.0]", "no task, no reward"), "verl_rollouts.py"),
)


@pytest.mark.parametrize("case", CASES, ids=[case.heading for case in CASES])
async def test_a_trainers_program_gets_the_expected_rewards(
    case: Case, served: Served, model: dict[str, str], folder: Path, request: pytest.FixtureRequest
) -> None:
    python = request.getfixturevalue("python_3_12") if case.needs_3_12 else sys.executable
    programs = await install(folder, *case.packages, python=python)
    before = episodes_of(served)
    command = [programs / "python", *([PROGRAMS / case.driver] if case.driver else [])]
    environment = {**model, **dict(case.variables)}
    output = await run(
        block(PAGE, case.heading, "python"), command, url=served.url, folder=folder, environment=environment
    )
    lines = [line for line in output.splitlines() if line.startswith(tuple(case.output))]
    assert sorted(lines) == sorted(case.output)
    assert served.episodes.live == []
    if case.sends_notes:
        assert_thoughts_stand_before_calls(episodes_of(served) - before)
