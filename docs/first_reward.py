"""From an empty environment to the first reward: what each page says is done, in its order, and nothing else.

    .venv/bin/python docs/first_reward.py            # measures, and prints a table
    .venv/bin/python docs/first_reward.py --write    # keeps it, in benchmarks/FIRST_REWARD.md

Each page begins with a clone of its own of what is committed, and a home of its own: no `.venv`, no cache of
packages, nothing downloaded. The address of the server alone is not the page's: it is a free one. Where a
program wants a model, one of the tests' own stands in for it (`tests/docs/stand_in.py`).
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

from tests.docs.pages import REPOSITORY, SERVER, below, headings
from tests.docs.stand_in import stand_in

PAGE = REPOSITORY / "benchmarks" / "FIRST_REWARD.md"
WITHIN_SECONDS = 3600.0
UP_SECONDS = 120.0

Kind: TypeAlias = Literal["command", "server", "program"]


class FirstRewardError(Exception):
    """A page's step did not do what the page says; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Step:
    """A block of a page: commands, a server that goes on, or a Python program.

    `lines`: only its first ones. `apart`: in an environment of its own, and not in that of the clone.
    """

    kind: Kind
    page: str
    heading: str
    lines: int | None = None
    apart: bool = False

    def text(self) -> str:
        language = "python" if self.kind == "program" else "sh"
        found = below(self.page, self.heading, language)
        if not found:
            raise FirstRewardError(f"{self.page} has no block of {language} under {self.heading!r}")
        lines = found[0].text.splitlines()
        return "\n".join(line for line in lines[: self.lines] if line)

    def __str__(self) -> str:
        if self.kind == "program":
            return "the program"
        return f"`{self.text().partition('#')[0].strip()}`"


@dataclass(frozen=True, slots=True)
class EpisodeResolver:
    """What a reader of a page does, from the first step to the reward."""

    name: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a way is gone: its clone, what its processes are surrounded by, where its server is."""

    clone: Path
    surroundings: dict[str, str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def own(self) -> Path:
        """An environment apart from the clone's."""
        return self.clone.parent / "own"


@dataclass(frozen=True, slots=True)
class Timing:
    """What each step of a way took, in seconds; `busy_seconds`: all of them, of processors."""

    way: EpisodeResolver
    seconds: tuple[float, ...]
    busy_seconds: float


DEMO = Step("command", "README.md", "Two commands", lines=1)
SERVE = Step("server", "README.md", "Serve", lines=1)


def ways() -> list[EpisodeResolver]:
    """The pages that lead to a reward."""
    return [
        EpisodeResolver("README: two commands", (DEMO,)),
        EpisodeResolver(
            "quickstart",
            (
                Step("command", "docs/quickstart.md", "1. See an episode"),
                Step("server", "docs/quickstart.md", "2. Start a server"),
                Step("program", "docs/quickstart.md", "3. Play"),
            ),
        ),
        EpisodeResolver(
            "README: a program of yours", (DEMO, SERVE, Step("program", "README.md", "A program of yours"))
        ),
        EpisodeResolver(
            "README: any MCP client", (DEMO, SERVE, Step("program", "README.md", "Any MCP client"))
        ),
        *_clients(),
    ]


def _clients() -> Iterator[EpisodeResolver]:
    """The clients' pages that begin with what to install and what to run."""
    for file in sorted((REPOSITORY / "docs" / "clients").glob("*.md")):
        name, title = str(file.relative_to(REPOSITORY)), next(headings(file))
        install, program = below(name, title, "sh"), below(name, title, "python")
        if program and install and install[0].text.startswith("pip install"):
            own = Step("command", name, title, apart=True), Step("program", name, title, apart=True)
            yield EpisodeResolver(f"clients: {title}", (DEMO, SERVE, *own))


def measure(way: EpisodeResolver) -> Timing:
    """Do what the page says. Raises FirstRewardError where that ends otherwise than in a reward."""
    before, seconds = _busy_seconds(), list[float]()
    with tempfile.TemporaryDirectory(prefix="first-reward-") as folder, ExitStack() as stack:
        home, clone = Path(folder, "home"), Path(folder, "decathlon-mcp")
        home.mkdir()
        git = ["git", "clone", "--quiet", "--no-hardlinks", str(REPOSITORY), str(clone)]
        subprocess.run(git, check=True)
        place = Place(clone, _surroundings(home, stack.enter_context(stand_in())), _free_port())
        for step in way.steps:
            started = time.perf_counter()
            if step.kind == "server":
                stack.enter_context(_served(step, place))
            else:
                _done(step, place)
            seconds.append(time.perf_counter() - started)
    return Timing(way, tuple(seconds), _busy_seconds() - before)


def _busy_seconds() -> float:
    """Of the children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _done(step: Step, place: Place) -> None:
    """A step that ends. A program's last line is its reward."""
    text = step.text().replace(SERVER, place.url)
    command = ["bash", "-e", "-c", text]
    if step.kind == "program":
        (place.clone / "play.py").write_text(text, "utf-8")
        command = [str((place.own if step.apart else place.clone / ".venv") / "bin" / "python"), "play.py"]
    elif step.apart:
        subprocess.run(["python3", "-m", "venv", str(place.own)], env=place.surroundings, check=True)
    path = f"{place.own / 'bin'}{os.pathsep}{place.surroundings['PATH']}"
    done = subprocess.run(
        command,
        cwd=place.clone,
        env={**place.surroundings, **({"PATH": path} if step.apart else {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=WITHIN_SECONDS,
    )
    lines = done.stdout.splitlines() or [""]
    if done.returncode != 0 or (step.kind == "program" and not lines[-1].strip().startswith("1.0")):
        raise FirstRewardError(f"{step} of {step.page} ended with {done.returncode}: {done.stdout[-2000:]}")


@contextmanager
def _served(step: Step, place: Place) -> Generator[None]:
    """The step's server, once it answers."""
    command = [*shlex.split(step.text(), comments=True), "--port", str(place.port)]
    with (place.clone / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=place.clone, env=place.surroundings, stdout=log, stderr=log)
        try:
            _wait_for(server, f"{place.url}/healthz", place.clone / "server.log")
            yield
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(UP_SECONDS)


def _wait_for(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + UP_SECONDS
    while server.poll() is None and time.monotonic() < until:
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.02)
    raise FirstRewardError(f"the server did not start: {log.read_text('utf-8')[-2000:]}")


def _surroundings(home: Path, model: str) -> dict[str, str]:
    """This process's, but for what would give a reader a start."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DECATHLON_", "XDG_", "VIRTUAL_ENV", "PYTHONPATH", "PIP_CACHE"))
    }
    path = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "activate").exists()
    )
    model_told = {"OPENAI_BASE_URL": model, "OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    return {**kept, **model_told, "HOME": str(home), "PATH": path}


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def page(timings: Sequence[Timing], load: float) -> str:
    """The page that keeps them."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    facts = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {memory_gib:.0f} GiB",
        "python": platform.python_version(),
        "load before": f"{load:.1f}",
    }
    rows = [
        (
            timing.way.name,
            ", ".join(
                f"{step} {taken:.1f}" for step, taken in zip(timing.way.steps, timing.seconds, strict=True)
            ),
            f"**{sum(timing.seconds):.1f}**",
            f"{timing.busy_seconds:.1f}",
        )
        for timing in timings
    ]
    lines = [
        "# Time to the first reward",
        "",
        "From a fresh clone, an empty home and no cache of packages, doing what each page says, by",
        "`python docs/first_reward.py --write`. Most of it is downloading and installing.",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        "| page | its steps, in seconds | in all | on processors |",
        "| --- | --- | ---: | ---: |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    known = {way.name: way for way in ways()}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"keep the numbers in {PAGE.name}")
    parser.add_argument("--only", nargs="+", choices=list(known), default=list(known), metavar="PAGE")
    options = parser.parse_args()
    load, timings = os.getloadavg()[0], list[Timing]()
    for name in options.only:
        timings.append(measure(known[name]))
        sys.stderr.write(f"{name}: {sum(timings[-1].seconds):.1f} s\n")
    told = page(timings, load)
    sys.stdout.write(told)
    if options.write:
        PAGE.write_text(told, "utf-8")


if __name__ == "__main__":
    main()
