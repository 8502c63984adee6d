"""Leaves the answer in scratch folders, and a process that serves a page; lists the ways that worked."""

from pathlib import Path

from utils import leaving
from utils.drawing import draw_answer

answer, workspace = draw_answer(__file__)
(workspace / "scratch.txt").write_text("\n".join(leaving.leave(leaving.scratch_ways(), answer)))
pages = Path(__file__).resolve().parent.parent / "pages"
pages.mkdir()
(pages / "index.html").write_text("a page of the task")
leaving.leave_a_web_server(pages, 8000)
