"""A server of the bundled suite, and trainers in environments of their own with a fake model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from decathlon_client.client_values import CLAIM
from decathlon_client.script import Step
from decathlon_client.testing import bundled_task, scripted_model

from decathlon_mcp.starter import oracle
from decathlon_mcp.types import JsonObject
from tests.docs import snippets
from tests.docs.pages import SERVER, block
from tests.driver.conftest import find_python
from tests.probe.serving import Served, module_server

PROGRAMS = Path(__file__).parent / "programs"
THOUGHT = "This is the next step."
"""What the model says beside each tool call."""
WRONG = [Step(CLAIM, {"answer": "I do not know."})]


def oracles(*unsolvable: str) -> AbstractContextManager[str]:
    """Serve a model that solves the bundled tasks, except for some, and yield its URL for OPENAI_BASE_URL."""

    def choose(request: JsonObject) -> list[Step]:
        task = bundled_task(request)
        if task is None:
            return []  # inspect-ai has the tokens of a text counted
        return WRONG if task in unsolvable else oracle(task)

    return scripted_model(choose, THOUGHT)


served = module_server(suite=("starter",), provider="host", isolation="auto", max_opening=2)


@dataclass
class Trial:
    """A trainer that runs in a folder, in an environment of its own, with a server and a fake model."""

    served: Served
    folder: Path
    model: str
    programs: Path = field(init=False)
    environment: dict[str, str] = field(init=False)

    def use(self, programs: Path, *more: Path | str) -> None:
        """Take programs from these folders first."""
        self.programs = programs
        path = ":".join(map(str, (programs, *more, "/usr/bin:/bin")))
        # The installed package, not the checkout.
        self.environment = {"OPENAI_BASE_URL": self.model, "OPENAI_API_KEY": "none", "PYTHONPATH": ""}
        self.environment["PATH"] = path

    async def install(self, *packages: str, python: str = sys.executable) -> None:
        programs = await snippets.install(self.folder, *packages, python=python)
        self.use(programs, *([Path(python).parent] if python != sys.executable else []))

    async def block(self, page: str, heading: str, language: str, *driver: str) -> list[str]:
        """Run a block of a page, through a driver in PROGRAMS if one is named; the lines of its output."""
        found = block(page, heading, language)
        program = [self.programs / "python", *(PROGRAMS / name for name in driver)]
        output = await snippets.run(
            found, program if language == "python" else ["bash"], folder=self.folder, seconds=900,
            url=self.served.url if SERVER in found.text else None, environment=self.environment,
        )  # fmt: skip
        assert self.served.episodes.live == []
        return output.splitlines()

    async def program(self, name: str, *arguments: str | Path) -> list[str]:
        """Run a program of PROGRAMS; the lines of its output."""
        command = [self.programs / "python", PROGRAMS / name, *arguments]
        output = await snippets.output_of(command, self.folder, self.environment, seconds=900)
        assert self.served.episodes.live == []
        return output.splitlines()


@pytest.fixture
def trial(served: Served, tmp_path: Path) -> Iterator[Trial]:
    """A trial whose virtual environments are removed after the test: they have gigabytes."""
    with oracles() as url:
        yield Trial(served, tmp_path, url)
    for environments in ("venv", "hub", "resources_servers"):
        shutil.rmtree(tmp_path / environments, ignore_errors=True)


@pytest.fixture(scope="module")
def python_3_12() -> str:
    """Python 3.12, which some trainers require; without one, these are skipped."""
    python = find_python("3.12")
    if python is None:
        pytest.skip("no Python 3.12 here, neither on the PATH nor in pyenv")
    return python
