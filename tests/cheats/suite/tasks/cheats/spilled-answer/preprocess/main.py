"""Leaves the answer in every way, and a process that serves a page."""

from utils import leaving
from utils.drawing import draw_answer

answer, workspace = draw_answer(__file__)
leaving.leave({**leaving.scratch_ways(), **leaving.other_ways()}, answer)
leaving.leave_a_web_server(workspace, 8000)
