"""Records and replays three of Toolathlon's web tasks against stand-ins for their sites; run by hand.

    python -m tools.fidelity.recorded_web CHECKOUT IMAGE [TASK...]

Needs a Docker engine with an image that has the tasks' servers, and mitmdump. The stand-ins serve arXiv with
invented papers, a search engine, and a page; they are switched off before anything is replayed. Rollouts use
the task's own tools only. For each task it prints, as a row of a table, the rewards and how the requests were
answered: recorded, replayed, of another rollout (which asks for a part of it, in another order), and of one
that does nothing; and which part of the other rollout's requests was answered.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import anyio

from decathlon_mcp.plugins.web.recording import FOLDER, Recording, find_recordings
from tests.probe.clients import Player, playing
from tests.probe.serving import Served, serving
from tests.web.sites import Sites, sites
from tools.fidelity.arxiv_server import NAMES, Handler

ALITA = (
    "Alita: Generalist Agent Enabling Scalable Agentic Reasoning with Minimal Predefinition and Maximal "
    "Self-Evolution"
)
PAPERS: list[dict[str, Any]] = [
    {
        "id": number,
        "versions": versions,
        "title": title,
        "authors": ["A. Author", "B. Author"],
        "categories": ["cs.AI"],
        "summary": summary,
        "published": "2025-05-26T00:00:00Z",
        "updated": "2025-05-28T00:00:00Z",
    }
    for number, versions, title, summary in (
        ("2505.20286", 2, ALITA, "Code: https://github.com/CharlesQ9/Alita"),
        ("2505.00001", 1, "Another Alita, of Steel", "Nothing about agents."),
        ("2410.23123", 2, "On Memorization of Large Language Models in Logical Reasoning", "K&K puzzles."),
        ("2502.01100", 1, "ZebraLogic: On the Scaling Limits of LLMs for Logical Reasoning", "Puzzles."),
        ("2410.06526", 3, "KOR-Bench: Benchmarking Knowledge-Orthogonal Reasoning Tasks", "Five categories."),
    )
]
PAGE = (
    "<html><head><title>Timetable</title></head><body><h1>Examinations</h1><p>In the hall.</p></body></html>"
)
Play = Callable[[Player, Path, bool], Awaitable[None]]


class SearchHandler(BaseHTTPRequestHandler):
    """The search engine that `web_search` asks."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["q"]
        found = {"title": query, "link": "https://timetable.example.edu/", "snippet": f"About {query}"}
        body = json.dumps({"organic": [found], "key": self.headers["X-API-KEY"]}).encode()
        self.send_response(200 if self.headers["X-API-KEY"] not in (None, "XX") else 403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class PageHandler(BaseHTTPRequestHandler):
    """A web page."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(PAGE)))
        self.send_header("Set-Cookie", "session=0123456789abcdef")
        self.end_headers()
        self.wfile.write(PAGE.encode())


async def find_alita(player: Player, checkout: Path, other: bool) -> None:
    """`other`: in another order, without a search."""
    paper = "2505.20286"
    if other:
        await show(player, "scholarly__search-arxiv", keyword="Alita")
    await show(player, "arxiv_local__search_papers", query="ti:Alita", max_results=10)
    if not other:
        await show(player, "scholarly__search-arxiv", keyword="Alita")
        await show(player, "arxiv_local__search_papers", query="ti:Steel", max_results=10)
    await show(player, "arxiv_local__download_paper", paper_id=paper)
    folder = f"{await workspace(player)}/arxiv_local_storage"
    listing = await player.text("filesystem__list_directory", path=folder)
    files = [line.partition(" ")[2] for line in listing.splitlines() if line.endswith(".pdf")]
    target = f"{await workspace(player)}/alita_{paper}.pdf"
    await show(player, "filesystem__move_file", source=f"{folder}/{files[0]}", destination=target)


async def collect_datasets(player: Player, checkout: Path, other: bool) -> None:
    queries = ["ti:ZebraLogic", "ti:KOR-Bench"]
    for query in reversed(queries) if other else queries:
        await show(player, "arxiv_local__search_papers", query=query, max_results=10)
    await show(player, "fetch__fetch_html", url="https://arxiv.org/abs/2410.23123")
    if not other:
        await show(player, "local__web_search", query="BIG-Bench Extra Hard number of tasks")
    table = (
        checkout / "tasks/finalpool/logical-datasets-collection/groundtruth_workspace/datasets.tex"
    ).read_text()
    await write(player, "datasets.tex", table)


async def schedule_courses(player: Player, checkout: Path, other: bool) -> None:
    await show(player, "local__web_search", query="examinations timetable")
    tool = "fetch__fetch_txt" if other else "fetch__fetch_html"
    await show(player, tool, url="https://timetable.example.edu/")
    if not other:
        await show(player, tool, url="https://timetable.example.edu/rooms")
    solution = checkout / "tasks/finalpool/course-schedule/groundtruth_workspace/exam_schedule.jsonl"
    await write(player, "exam_schedule.jsonl", solution.read_text("utf-8"))


PLAYS: dict[str, Play] = {
    "find-alita-paper": find_alita,
    "logical-datasets-collection": collect_datasets,
    "course-schedule": schedule_courses,
}


async def show(player: Player, tool: str, **arguments: Any) -> str:
    """Call a tool and print the beginning of its reply."""
    reply = await player.text(tool, **arguments)
    print(f"    {tool}: {' '.join(reply.split())[:110]}")  # noqa: T201
    return reply


async def workspace(player: Player) -> str:
    listing = await player.text("filesystem__list_allowed_directories")
    return listing.strip().splitlines()[-1].strip()


async def write(player: Player, name: str, text: str) -> None:
    path = f"{await workspace(player)}/{name}"
    await player.call("filesystem__write_file", path=path, content=text)


async def rollout(served: Served, checkout: Path, task: str, *, play: Play | None, other: bool) -> str:
    """Play once; returns the reward and the counts in words."""
    async with playing(served, task, "task") as player:
        if play is not None:
            await play(player, checkout, other)
        await player.call("claim_done")
        verdict = (await player.call("evaluate")).structured_content
    web: dict[str, Any] = verdict.get("web") or {}
    counts = {name: number for name, number in web.items() if isinstance(number, int) and number}
    if verdict["reward"] is None or (play is not None and verdict["reward"] != 1.0):
        print(verdict["status"], verdict["detail"], verdict["evaluator_output"][-1500:])  # noqa: T201
    return f"{verdict['reward']} {counts}"


@asynccontextmanager
async def server(
    state: Path, checkout: Path, image: str, mode: str, running: Sites | None
) -> AsyncGenerator[Served]:
    settings: dict[str, Any] = {"suite": (str(checkout),), "image": image, "provider": "docker", "web": mode}
    if running is not None:
        settings |= {"web_address": running.addresses, "web_authorities": running.authority}
    async with serving(state, servers_seconds=300, **settings) as served:
        yield served


async def main(source: Path, image: str, tasks: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        state, checkout = Path(folder, "state"), Path(folder, "checkout")
        shutil.copytree(source, checkout, symlinks=True)
        keys = checkout / "configs/token_key_session.py"
        example = (checkout / "configs/token_key_session_example.py").read_text("utf-8")
        keys.write_text(
            example.replace('serper_api_key = "XX"', 'serper_api_key = "0123456789secret"'), "utf-8"
        )
        arxiv = type("ArxivHandler", (Handler,), {"papers": PAPERS})
        handlers: dict[tuple[str, ...], type[BaseHTTPRequestHandler]] = {
            NAMES: arxiv,
            ("google.serper.dev",): SearchHandler,
            ("timetable.example.edu",): PageHandler,
        }
        results: dict[str, list[str]] = {task: [] for task in tasks}
        with sites(Path(folder), handlers) as running:
            async with server(state, checkout, image, "record", running) as served:
                for task in tasks:
                    results[task].append(await rollout(served, checkout, task, play=PLAYS[task], other=False))
        keys.unlink()
        async with server(state, checkout, image, "replay", None) as served:
            for task in tasks:
                for play, other in ((PLAYS[task], False), (PLAYS[task], True), (None, False)):
                    results[task].append(await rollout(served, checkout, task, play=play, other=other))
        for path in find_recordings(state / FOLDER):
            assert b"0123456789secret" not in path.read_bytes(), "a credential was stored"
            assert b"0123456789abcdef" not in path.read_bytes(), "a cookie was stored"
            with Recording(path) as recording:
                summary, unanswered = recording.summary(), recording.unanswered()
            for request in unanswered:
                why = request.failure or "missed"
                print(f"  {summary.id.task}: {request.method} {request.url}: {request.count} times, {why}")  # noqa: T201
            results[summary.id.task].append(f"{summary.rate:.0%}" if summary.rate is not None else "-")
        for task, cells in results.items():
            print(f"| `{task}` | " + " | ".join(cells) + " |")  # noqa: T201


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), sys.argv[2], sys.argv[3:] or list(PLAYS))
