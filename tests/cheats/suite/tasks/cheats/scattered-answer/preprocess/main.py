"""Leaves the answer in every way, also in a process, and lists the ways that worked."""

from utils import leaving
from utils.drawing import draw_answer

answer, workspace = draw_answer(__file__)
(workspace / "scratch.txt").write_text("\n".join(leaving.leave(leaving.scratch_ways(), answer)))
(workspace / "others.txt").write_text("\n".join(leaving.leave(leaving.other_ways(), answer)))
(workspace / "impossible.txt").write_text("\n".join(leaving.leave(leaving.impossible_ways(), answer)))
leaving.leave_a_process(answer)
