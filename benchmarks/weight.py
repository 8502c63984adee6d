"""How much there is to read: `python -m benchmarks.weight [--path]`.

Counts the lines of each package of the product: code, docstrings and comments, and blank lines. With
`--path`, plays an episode of the bundled suite in this process and follows an opening, a call and a claim
through the server: the files of ours that run on the event loop, and the hand-offs, the turns of the
event loop in which code of ours runs.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import sys
import tempfile
import tokenize
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import anyio
from decathlon_client import Decathlon

from decathlon_mcp.app import bootstrap
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.listening import listen
from decathlon_mcp.http.server import serve_http
from decathlon_mcp.settings import read_settings

ROOT = Path(__file__).parents[1]
PRODUCT = {
    "server": ROOT / "decathlon_mcp",
    "driver": ROOT / "sandbox/decathlon_sandbox",
    "client": ROOT / "clients",
}
NOT_OURS_TO_READ = ROOT / "decathlon_mcp/starter/suite"
"""The bundled suite is content, not a part of the server."""
TASK, TOOL = "recount-ballots", "files__list_directory"


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of Python files."""

    modules: int = 0
    code: int = 0
    prose: int = 0
    """Docstrings, and lines that are only a comment."""
    blank: int = 0

    @property
    def all(self) -> int:
        return self.code + self.prose + self.blank

    def __add__(self, other: Lines) -> Lines:
        return Lines(
            self.modules + other.modules,
            self.code + other.code,
            self.prose + other.prose,
            self.blank + other.blank,
        )


def count_lines(source: str) -> Lines:
    """The lines of one module."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body: list[ast.stmt] = (
            getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []
        )
        for statement in body:
            # Attributes have docstrings too.
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                prose |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1].lstrip().startswith("#"):
            prose.add(token.start[0])
    blank = sum(not line.strip() for number, line in enumerate(lines, 1) if number not in prose)
    return Lines(1, len(lines) - len(prose) - blank, len(prose), blank)


def product_lines() -> dict[str, Lines]:
    """Lines by part of the product and package."""
    found: dict[str, Lines] = {}
    for part, folder in PRODUCT.items():
        for path in sorted(folder.rglob("*.py")):
            if path.is_relative_to(NOT_OURS_TO_READ):
                continue
            package = path.relative_to(folder).parts[0] if len(path.relative_to(folder).parts) > 1 else "-"
            name = f"{part}/{package}"
            found[name] = found.get(name, Lines()) + count_lines(path.read_text())
    return found


def lines_table() -> Iterator[str]:
    """A table of `product_lines` with the sums of each part."""
    rows = product_lines()
    yield f"{'package':32} {'modules':>8} {'code':>8} {'prose':>8} {'blank':>8} {'lines':>8}"
    for part in PRODUCT:
        of_part = {name: lines for name, lines in rows.items() if name.startswith(f"{part}/")}
        for name, lines in of_part.items():
            yield _row(f"  {name}", lines)
        yield _row(part, sum(of_part.values(), Lines()))
    yield _row("all", sum(rows.values(), Lines()))


def _row(name: str, lines: Lines) -> str:
    return f"{name:32} {lines.modules:8} {lines.code:8} {lines.prose:8} {lines.blank:8} {lines.all:8}"


@dataclass(slots=True)
class Route:
    """What ran of the server between two moments.

    `hand_offs`: turns of the event loop, and functions in worker threads, in which code of the server ran.
    """

    files: set[str] = field(default_factory=set[str])
    functions: int = 0
    hand_offs: int = 0


@contextmanager
def follow() -> Generator[Route]:
    """Follow the server's code on the event loop of this thread, which must be asyncio's own."""
    route, is_new_turn, server = Route(), True, f"{PRODUCT['server']}/"

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal is_new_turn
        if event != "call":
            return
        if frame.f_code is _TURN:
            is_new_turn = True
        elif (name := frame.f_code.co_filename).startswith(server):
            route.files.add(name.removeprefix(server))
            route.functions += 1
            route.hand_offs += is_new_turn
            is_new_turn = False

    sys.setprofile(profile)
    try:
        yield route
    finally:
        sys.setprofile(None)


_TURN = asyncio.Handle._run.__code__  # pyright: ignore


@asynccontextmanager
async def serving(state: Path) -> AsyncGenerator[str]:
    """A server of the bundled suite in this process, with its defaults; yields its URL."""
    listener = listen("127.0.0.1", 0)
    async with bootstrap(read_settings({"state": state})) as episodes, anyio.create_task_group() as tasks:
        ready, stop = anyio.Event(), anyio.Event()

        async def serve() -> None:
            await serve_http(
                http_app(episodes),
                listener,
                drain=episodes.drain,
                on_ready=ready.set,
                stop=stop,
                metrics=episodes.metrics,
            )

        tasks.start_soon(serve)
        await ready.wait()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stop.set()


async def follow_episode() -> dict[str, Route]:
    """The routes of an opening, of a call and of a claim. Each was taken once before, to fill the caches."""
    routes: dict[str, Route] = {}
    with tempfile.TemporaryDirectory() as state:
        async with serving(Path(state)) as url, Decathlon(url) as d:
            for _ in range(2):
                with follow() as routes["opening"]:
                    episode = d.episode(TASK)
                    e = await episode.__aenter__()
                try:
                    await e.call(TOOL, {"path": "."})
                    with follow() as routes["call"]:
                        await e.call(TOOL, {"path": "."})
                    with follow() as routes["claim and evaluation"]:
                        await e.evaluate()
                finally:
                    await episode.__aexit__(None, None, None)
    return routes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight", description=__doc__)
    parser.add_argument("--path", action="store_true", help="follow an opening, a call and a claim")
    parser.add_argument("--files", action="store_true", help="with --path: name the files")
    arguments = parser.parse_args()
    write = sys.stdout.write
    write("\n".join(lines_table()) + "\n")
    if arguments.path:
        write(f"\n{'path through the server':32} {'files':>8} {'calls':>8} {'hand-offs':>9}\n")
        for name, route in anyio.run(follow_episode).items():
            write(f"{name:32} {len(route.files):8} {route.functions:8} {route.hand_offs:9}\n")
            if arguments.files:
                write("".join(f"    {file}\n" for file in sorted(route.files)))


if __name__ == "__main__":
    main()
