"""Measures the time from an empty environment to the first reward, by following each page step by step.

    .venv/bin/python docs/first_reward.py            # prints a table
    .venv/bin/python docs/first_reward.py --write    # also saves it in benchmarks/FIRST_REWARD.md

Each page starts with a fresh clone of the last commit and an empty home: no `.venv`, no cache of packages.
Only the server's port differs from the page: it is a free one. Programs that need a model get a scripted one
(`decathlon_client.testing`).
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.error import URLError
from urllib.request import urlopen

from decathlon_client.testing import scripted_model

from decathlon_mcp.starter import oracle
from tests.docs.pages import REPOSITORY, SERVER, below, headings

PAGE = REPOSITORY / "benchmarks" / "FIRST_REWARD.md"
STEP_TIMEOUT_SECONDS = 3600.0
SERVER_TIMEOUT_SECONDS = 120.0

Kind: TypeAlias = Literal["command", "server", "program"]


class FirstRewardError(Exception):
    """A step of a page failed; the message holds the end of its output."""


@dataclass(frozen=True, slots=True)
class Step:
    """A code block of a page: commands, a server that keeps running, or a Python program.

    `lines`: from which of its lines to which, counted from 1; None: all. `own_venv`: use a virtual
    environment other than the clone's.
    """

    kind: Kind
    page: str
    heading: str
    lines: tuple[int, int] | None = None
    own_venv: bool = False

    def text(self) -> str:
        language = "python" if self.kind == "program" else "sh"
        candidates = below(self.page, self.heading, language)
        if not candidates:
            raise FirstRewardError(f"{self.page} has no block of {language} under {self.heading!r}")
        first, last = self.lines or (1, None)
        lines = candidates[0].text.splitlines()[first - 1 : last]
        return "\n".join(line for line in lines if line)

    def __str__(self) -> str:
        if self.kind == "program":
            return "the program"
        return f"`{self.text().partition('#')[0].strip()}`"


@dataclass(frozen=True, slots=True)
class Walkthrough:
    """The steps of a page's reader, from the first one to the reward."""

    name: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """The clone, the environment variables and the server's port of one walkthrough."""

    clone: Path
    environment: dict[str, str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def own_venv(self) -> Path:
        """A virtual environment other than the clone's."""
        return self.clone.parent / "own"


@dataclass(frozen=True, slots=True)
class Timing:
    """The duration of each step, and the processor time of all of them."""

    walkthrough: Walkthrough
    seconds: tuple[float, ...]
    cpu_seconds: float


DEMO = Step("command", "README.md", "Two commands", lines=(2, 2))
SERVE = Step("server", "README.md", "Serve", lines=(1, 1))


def walkthroughs() -> list[Walkthrough]:
    """One for each page that leads to a reward."""
    return [
        Walkthrough("README: two commands", (DEMO,)),
        Walkthrough(
            "quickstart",
            (
                Step("command", "docs/quickstart.md", "1. Watch an episode"),
                Step("server", "docs/quickstart.md", "2. Start a server"),
                Step("program", "docs/quickstart.md", "3. Play"),
            ),
        ),
        Walkthrough("README: a rollout", (DEMO, Step("program", "README.md", "Train"))),
        *_clients(),
    ]


def _clients() -> Iterator[Walkthrough]:
    """The clients' pages that start with a `pip install` and a program."""
    for file in sorted((REPOSITORY / "docs" / "clients").glob("*.md")):
        name, title = str(file.relative_to(REPOSITORY)), next(headings(file))
        install, program = below(name, title, "sh"), below(name, title, "python")
        if program and install and install[0].text.startswith("pip install"):
            steps = Step("command", name, title, own_venv=True), Step("program", name, title, own_venv=True)
            yield Walkthrough(f"clients: {title}", (DEMO, SERVE, *steps))


def measure(walkthrough: Walkthrough) -> Timing:
    """Do what the page says. Raises FirstRewardError if it does not end in a reward."""
    cpu_seconds_before, seconds = _cpu_seconds(), list[float]()
    with tempfile.TemporaryDirectory(prefix="first-reward-") as folder, ExitStack() as stack:
        home, clone = Path(folder, "home"), Path(folder, "decathlon-mcp")
        home.mkdir()
        git = ["git", "clone", "--quiet", "--no-hardlinks", str(REPOSITORY), str(clone)]
        subprocess.run(git, check=True)
        machine = Machine(
            clone,
            _environment(home, stack.enter_context(scripted_model(oracle("tune-reactor")))),
            _free_port(),
        )
        for step in walkthrough.steps:
            started = time.perf_counter()
            if step.kind == "server":
                stack.enter_context(_serving(step, machine))
            else:
                _run(step, machine)
            seconds.append(time.perf_counter() - started)
    return Timing(walkthrough, tuple(seconds), _cpu_seconds() - cpu_seconds_before)


def _cpu_seconds() -> float:
    """Processor time of the child processes that have ended, their own children included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run(step: Step, machine: Machine) -> None:
    """Run a step that ends by itself. The last line that a program prints is its reward."""
    text = step.text().replace(SERVER, machine.url)
    command = ["bash", "-e", "-c", text]
    if step.kind == "program":
        (machine.clone / "play.py").write_text(text, "utf-8")
        command = [
            str((machine.own_venv if step.own_venv else machine.clone / ".venv") / "bin" / "python"),
            "play.py",
        ]
    elif step.own_venv:
        subprocess.run(["python3", "-m", "venv", str(machine.own_venv)], env=machine.environment, check=True)
    path = f"{machine.own_venv / 'bin'}{os.pathsep}{machine.environment['PATH']}"
    process = subprocess.run(
        command,
        cwd=machine.clone,
        env={**machine.environment, **({"PATH": path} if step.own_venv else {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=STEP_TIMEOUT_SECONDS,
    )
    lines = process.stdout.splitlines() or [""]
    if process.returncode != 0 or (step.kind == "program" and not lines[-1].strip().startswith("1.0")):
        raise FirstRewardError(
            f"{step} of {step.page} ended with {process.returncode}: {process.stdout[-2000:]}"
        )


@contextmanager
def _serving(step: Step, machine: Machine) -> Generator[None]:
    """Run the step's server; starts the body once it answers."""
    command = [*shlex.split(step.text(), comments=True), "--port", str(machine.port)]
    with (machine.clone / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=machine.clone, env=machine.environment, stdout=log, stderr=log)
        try:
            _wait_for(server, f"{machine.url}/healthz", machine.clone / "server.log")
            yield
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(SERVER_TIMEOUT_SECONDS)


def _wait_for(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + SERVER_TIMEOUT_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.02)
    raise FirstRewardError(f"the server did not start: {log.read_text('utf-8')[-2000:]}")


def _environment(home: Path, model_url: str) -> dict[str, str]:
    """This process's environment without settings, caches and an active venv, which a new reader lacks."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DECATHLON_", "XDG_", "VIRTUAL_ENV", "PYTHONPATH", "PIP_CACHE"))
    }
    path = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "activate").exists()
    )
    model = {"OPENAI_BASE_URL": model_url, "OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    return {**inherited, **model, "HOME": str(home), "PATH": path}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def page(timings: Sequence[Timing], load: float) -> str:
    """The text of benchmarks/FIRST_REWARD.md."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    facts = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {memory_gib:.0f} GiB",
        "python": platform.python_version(),
        "load before": f"{load:.1f}",
    }
    rows = [
        (
            timing.walkthrough.name,
            ", ".join(
                f"{step} {seconds:.1f}"
                for step, seconds in zip(timing.walkthrough.steps, timing.seconds, strict=True)
            ),
            f"**{sum(timing.seconds):.1f}**",
            f"{timing.cpu_seconds:.1f}",
        )
        for timing in timings
    ]
    lines = [
        "# Time to the first reward",
        "",
        "Following each page from a fresh clone, with an empty home and no cache of packages. Measured by",
        "`python docs/first_reward.py --write`. Most of the time is downloading and installing.",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        "| page | steps (seconds) | total (seconds) | CPU (seconds) |",
        "| --- | --- | ---: | ---: |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    by_name = {walkthrough.name: walkthrough for walkthrough in walkthroughs()}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"also save the table in {PAGE.name}")
    parser.add_argument("--only", nargs="+", choices=list(by_name), default=list(by_name), metavar="PAGE")
    options = parser.parse_args()
    load, timings = os.getloadavg()[0], list[Timing]()
    for name in options.only:
        timings.append(measure(by_name[name]))
        sys.stderr.write(f"{name}: {sum(timings[-1].seconds):.1f} s\n")
    text = page(timings, load)
    sys.stdout.write(text)
    if options.write:
        PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
