"""How long lists, reports, trajectories and pages take in a large state folder, and what they cost others."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import anyio
from msgspec import Raw
from starlette.types import Message

from benchmarks.figures import Figures, Target
from benchmarks.running import Options, Run
from decathlon_mcp.http.authentication import AllowedHosts
from decathlon_mcp.http.server import tune_interpreter
from decathlon_mcp.plugins.history.columns import Outcome
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import FAILURES_FIRST, EpisodeQuery, Order
from decathlon_mcp.plugins.page.access import PageKey, Sessions, load_or_create_page_key
from decathlon_mcp.plugins.page.page import PageApp
from decathlon_mcp.plugins.page.site import Site
from decathlon_mcp.storage.store import EpisodeRow, Store
from decathlon_mcp.storage.trajectory import Trajectory
from decathlon_mcp.types import public_id

EPISODES, SHORT_EPISODES = 100_000, 2_000
RUNS = 50
SEARCHED = 1_000
"""The episode of which BRANCHES begin, and BELOW from each of these."""
BRANCHES, BELOW = 64, 8
TASKS = 40
CALLS = 10_000
LONG_BYTES, SHORT_LONG_BYTES = 256 << 20, 8 << 20
REPLY_BYTES = 1 << 20
LIST = Target("at most", 0.2)
"""Seconds in which the page's lists answer."""
FIRST = Target("at most", 1.5)
"""Seconds of the first view of a long episode; later ones take LATER at most."""
LATER = Target("at most", 0.3)
VIEWERS = 20
DELAY = Target("at most", 20.0)
"""Milliseconds for which viewers may keep the event loop from everything else."""
TICK_SECONDS = 0.001
EXPORTED, SHORT_EXPORTED = 10_000, 50
EXPORTED_CALLS = 20
MEMORY = Target("at most", 200)
"""MiB of a command that exports so many episodes."""


async def measure_watching(run: Run, figures: Figures) -> None:
    is_short = run.options.rounds < Options().rounds
    episodes = SHORT_EPISODES if is_short else EPISODES
    with tempfile.TemporaryDirectory(prefix="watching-") as folder:
        state = Path(folder)
        with Store.open(state, "benchmark") as store:
            for number in range(2):
                store.insert_episode(_row(number))
            _end(store, 0)
            _end(store, 1)
            copy_rows(state, episodes)
        _make_branches(state)
        many = _write_trajectory(state, _handle(0), CALLS, 1_000)
        long_bytes = SHORT_LONG_BYTES if is_short else LONG_BYTES
        long = _write_trajectory(state, _handle(1), long_bytes // REPLY_BYTES, REPLY_BYTES)
        for _ in range(run.options.repeats):
            _measure(state, figures, episodes, many, long, long_bytes >> 20)
            await _measure_pages(state, figures, episodes, many, long, long_bytes >> 20)
    with tempfile.TemporaryDirectory(prefix="exporting-") as folder:
        _measure_exports(Path(folder), figures, SHORT_EXPORTED if is_short else EXPORTED)


def _measure_exports(folder: Path, figures: Figures, episodes: int) -> None:
    """Time and largest memory of the commands that export all episodes; without those that lack a package."""
    state = folder / "state"
    state.mkdir()
    with Store.open(state, "benchmark") as store:
        for number in range(2):
            store.insert_episode(_row(number))
            _end(store, number)
        copy_rows(state, episodes)
    for number in range(episodes):
        _write_trajectory(state, _handle(number), EXPORTED_CALLS, 2_000)
    for form, package in (("jsonl", "json"), ("parquet", "pyarrow"), ("inspect", "inspect_ai")):
        if importlib.util.find_spec(package) is None:
            continue
        words = ["export", "--all", "--output", str(folder / form), "--to", form, "--state", str(state)]
        start = time.perf_counter()
        # A process of its own: its largest memory is known when it has ended.
        process = subprocess.Popen(
            [sys.executable, "-m", "decathlon_mcp.cli", *words], stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, form
        name = f"export of {episodes:,} episodes as {form}"
        figures.add(name, "s", time.perf_counter() - start)
        figures.add(f"{name}: memory", "MiB", usage.ru_maxrss / 1024, target=MEMORY)


def _measure(state: Path, figures: Figures, episodes: int, many: str, long: str, long_mib: int) -> None:
    history = EpisodeHistory([state])
    size = f"of {episodes:,} episodes"

    def add(name: str, target: Target, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        figures.add(name, "s", time.perf_counter() - start, target=target)

    add(f"runs {size}", LIST, history.runs)
    add(f"one run of {episodes // RUNS:,}, {size}", LIST, lambda: history.run("run-7"))
    add(f"two runs compared, {size}", LIST, lambda: history.compare(["run-7", "run-8"]))
    add(f"the newest 100 {size}", LIST, lambda: history.episodes(EpisodeQuery()))
    add(f"the newest 100 failures {size}", LIST, lambda: history.episodes(EpisodeQuery(failed=True)))
    for title, order in (("newest", Order()), ("failures first", FAILURES_FIRST)):
        query = EpisodeQuery(run="run-7", order=order)
        add(f"100 of a run, {title}, {size}", LIST, lambda query=query: history.episodes(query))
    by_calls = EpisodeQuery(order=Order("calls"))
    add(f"the 100 with the most calls {size}", FIRST, lambda: history.episodes(by_calls))
    add(f"runs {size}, by success", LIST, lambda: history.runs(by="success"))
    for name, episode in ((f"{CALLS:,} calls", many), (f"{long_mib} MiB", long)):
        add(f"first view of {name}", FIRST, lambda episode=episode: history.episode(episode))
        add(f"100 calls of {name}", LATER, lambda episode=episode: history.calls(episode, 101, 200))
        add(f"search through {name}", FIRST, lambda episode=episode: history.find(episode, "not there"))


async def _measure_pages(
    state: Path, figures: Figures, episodes: int, many: str, long: str, long_mib: int
) -> None:
    """The pages as a browser gets them, without a network, and the event loop while many look."""
    tune_interpreter()
    key = load_or_create_page_key(state)
    app = PageApp(Site(EpisodeHistory([state]), Sessions(PageKey(key))), AllowedHosts().answers_to)
    _, headers = await _ask(app, "POST", "/page/session", body=urlencode({"secret": key}).encode())
    cookie = headers["set-cookie"].partition(";")[0]

    async def get(path: str) -> float:
        start = time.perf_counter()
        status, _ = await _ask(app, "GET", path, cookie=cookie)
        assert status == 200, f"{path}: {status}"
        return time.perf_counter() - start

    await get("/compare")  # the templates' first use
    for name, path, target in (
        (f"page / of {episodes:,} episodes", "/", LIST),
        (f"page of one run of {episodes // RUNS:,}", "/runs/run-7", LIST),
        (
            f"page with a tree of {1 + BRANCHES * (1 + BELOW)} of {episodes:,} episodes",
            f"/e/{public_id(_handle(SEARCHED))}",
            LIST,
        ),
        (f"page of {CALLS:,} calls, first", f"/e/{many}", FIRST),
        (f"page of {CALLS:,} calls, later", f"/e/{many}?call=7321", LATER),
        (f"page of {long_mib} MiB, first", f"/e/{long}", FIRST),
        (f"page of {long_mib} MiB, later", f"/e/{long}?call=101", LATER),
    ):
        figures.add(name, "s", await get(path), target=target)
    async with longest_delay() as delay:
        await anyio.sleep(1)
    figures.add("delay of an idle event loop", "ms", delay.seconds * 1e3)
    async with longest_delay() as delay, anyio.create_task_group() as viewers:
        for number in range(VIEWERS):
            path = ("/", "/runs/run-7", f"/e/{many}?call={number * 400 + 1}")[number % 3]
            viewers.start_soon(get, path)
    name = f"delay of the event loop with {VIEWERS} viewers"
    figures.add(name, "ms", delay.seconds * 1e3, target=DELAY)


async def _ask(
    app: PageApp, method: str, path: str, *, cookie: str = "", body: bytes = b""
) -> tuple[int, dict[str, str]]:
    """The status and headers of a response. A client's work would be in the event loop that is measured."""
    raw_path, _, query = path.partition("?")
    sent = {
        "host": "localhost:8765",
        "accept": "text/html",
        "sec-fetch-site": "same-origin",
        "content-length": str(len(body)),
        "cookie": cookie,
    }
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": raw_path,
        "raw_path": raw_path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "server": ("localhost", 8765),
    }
    started: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.append(message)

    await app(scope, receive, send)
    (start,) = started
    return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}


@dataclass
class Delay:
    """The longest that something was late."""

    seconds: float = 0.0


@asynccontextmanager
async def longest_delay() -> AsyncGenerator[Delay]:
    """Measure how late the event loop is with a timer, again and again, while the body runs."""
    delay = Delay()

    async def tick() -> None:
        while True:
            start = time.perf_counter()
            await anyio.sleep(TICK_SECONDS)
            delay.seconds = max(delay.seconds, time.perf_counter() - start - TICK_SECONDS)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        yield delay
        tasks.cancel_scope.cancel()


def _handle(number: int) -> str:
    return f"{number:048x}"


def _row(number: int) -> EpisodeRow:
    return EpisodeRow(
        id=_handle(number),
        agent_id=f"a{number:047x}",
        server="",
        suite="starter",
        task=f"task-{number % TASKS}",
        phase="ready",
        started_at=1e9 + number,
        spec={"text": "x" * 500},
        progress={"text": "x" * 500},
        labels={"run": f"run-{number % RUNS}", "step": f"{number % 100}", "model": "m"},
    )


def _end(store: Store, number: int) -> None:
    metrics = {"turns": 12.0, "calls": 30.0}
    verdict = {
        "status": "scored",
        "success": number % 3 == 0,
        "reward": 1.0 if number % 3 == 0 else 0.25,
        "metrics": metrics,
        "evaluator_output": "x" * 3_000,
    }
    store.update_episode(_handle(number), verdict=verdict)
    store.end_episode(_handle(number), "scored", calls=30)


def copy_rows(state: Path, count: int) -> None:
    """Fill a store with two episodes up to `count`, with rows like those that a server wrote."""
    with closing(sqlite3.connect(state / "store.db")) as connection, connection:
        columns = [str(row[1]) for row in connection.execute("PRAGMA table_info(episodes)")]
        template = dict(
            zip(
                columns,
                connection.execute(
                    f"SELECT {', '.join(columns)} FROM episodes WHERE id = ?", (_handle(1),)
                ).fetchone(),
                strict=True,
            )
        )
        rows = (_like(template, number) for number in range(2, count))
        marks = ", ".join(f":{column}" for column in columns)
        connection.executemany(f"INSERT INTO episodes ({', '.join(columns)}) VALUES ({marks})", rows)


def _make_branches(state: Path) -> None:
    """Make BRANCHES of an episode, and BELOW of each of these, of rows that are there."""
    origins = [SEARCHED] * BRANCHES + [2 + number // BELOW for number in range(BRANCHES * BELOW)]
    assert 2 + len(origins) <= SEARCHED
    with closing(sqlite3.connect(state / "store.db")) as connection, connection:
        connection.executemany(
            "UPDATE episodes SET branch_of = ?, branch_at = 3, is_derived = 1 WHERE id = ?",
            [(public_id(_handle(origin)), _handle(number)) for number, origin in enumerate(origins, 2)],
        )


def _like(template: dict[str, object], number: int) -> dict[str, object]:
    row = _row(number)
    is_lost, succeeded = number % 17 == 0, number % 3 == 0
    return {
        **template,
        "id": row.id,
        "public_id": row.public_id,
        "agent_id": row.agent_id,
        "task": row.task,
        "run": row.labels["run"],
        "step": float(row.labels["step"]),
        "labels": "{" + ", ".join(f'"{name}": "{value}"' for name, value in row.labels.items()) + "}",
        "started_at": row.started_at,
        "ended_at": row.started_at + 60,
        "reward": None if is_lost else 1.0 if succeeded else 0.25,
        "success": None if is_lost else succeeded,
        "outcome": Outcome.LOST if is_lost else Outcome.SUCCEEDED if succeeded else Outcome.FAILED,
        "status": "evaluator_error" if is_lost else "scored",
    }


def _write_trajectory(state: Path, handle: str, calls: int, reply_bytes: int) -> str:
    """Write calls with replies of that length; the episode's public id."""
    trajectory = Trajectory(state / "episodes" / handle, max_calls_bytes=1 << 40).create()
    reply = Raw(b'{"content":[{"type":"text","text":"%b"}]}' % (b"x" * reply_bytes))
    for seq in range(1, calls + 1):
        trajectory.add(
            "call",
            server="files",
            tool="read",
            request=seq,
            seq=seq,
            name="files__read",
            arguments={"path": "file"},
        )
        trajectory.add("reply", seq=seq, failed=False, seconds=0.01, result=reply)
    trajectory.close()
    return public_id(handle)
