"""Tasks with a recorded web whose sites a stand-in can imitate.

These attempts test the plumbing: a recording of plain pages, searches and arXiv's interface has the same
form, by whatever server they are served. Whether the real sites can be recorded is not tested.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.probe.clients import Player
from tests.web.sites import sites
from tools.fidelity.arxiv_server import NAMES, Handler
from tools.fidelity.calls import Solution, call, write_texts
from tools.fidelity.files import FilesOf, same, with_mistake
from tools.fidelity.recorded_web import PAPERS, PageHandler, SearchHandler

_PAGE = "https://timetable.example.edu"
_KEY = ('serper_api_key = "XX"', 'serper_api_key = "0123456789secret"')


def _after(files_of: FilesOf, *asked: tuple[str, dict[str, object], str]) -> Solution:
    """Call tools that use the web, each with a word that its reply has, then write the files."""

    async def solution(player: Player, task: Path, attempt: str) -> None:
        for tool, arguments, word in asked:
            reply = await call(player, tool, **arguments)
            assert word in reply, (tool, arguments, reply)
        files = files_of(task)
        await write_texts(player, with_mistake(files) if attempt == "wrong" else files)

    return solution


def _search(query: str) -> tuple[str, dict[str, object], str]:
    return "local__web_search", {"query": query}, query


def _fetch(path: str, tool: str = "fetch__fetch_html") -> tuple[str, dict[str, object], str]:
    return tool, {"url": f"{_PAGE}/{path}"}, "Examinations"


RECORDED: Mapping[str, Solution] = {
    "add-bibtex": _after(
        same("ref.bib"), ("scholarly__search-arxiv", {"keyword": "Alita"}, "Alita"), _search("a bibliography")
    ),
    "course-schedule": _after(same("exam_schedule.jsonl"), _search("examinations"), _fetch("rooms")),
    "hk-top-conf": _after(same("result.md"), _search("conferences"), _fetch("papers", "fetch__fetch_txt")),
    "identify-all-songs": _after(same("songs.md"), _search("songs"), _fetch("songs")),
    "logical-datasets-collection": _after(
        same("datasets.tex"),
        ("arxiv_local__search_papers", {"query": "ti:ZebraLogic", "max_results": 10}, "ZebraLogic"),
        ("fetch__fetch_html", {"url": "https://arxiv.org/abs/2410.23123"}, "Memorization"),
        _search("number of tasks"),
    ),
}


@contextmanager
def stand_ins(folder: Path, checkout: Path) -> Generator[dict[str, Any]]:
    """Serve the sites; yields the settings of a server that finds them. The checkout gets a key to search.

    The key stays: without history, all files of a checkout make its revision, to which a recording belongs.
    """
    example = (checkout / "configs/token_key_session_example.py").read_text()
    (checkout / "configs/token_key_session.py").write_text(example.replace(*_KEY))
    handlers: dict[tuple[str, ...], type[BaseHTTPRequestHandler]] = {
        NAMES: type("ArxivHandler", (Handler,), {"papers": PAPERS}),
        ("google.serper.dev",): SearchHandler,
        ("timetable.example.edu",): PageHandler,
    }
    with sites(folder, handlers) as running:
        yield {"web_address": running.addresses, "web_authorities": running.authority}
