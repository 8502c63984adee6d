"""The script that counts lines and follows an episode through the server."""

from __future__ import annotations

import anyio
import pytest

from benchmarks.weight import count_lines, follow_episode

MODULE = '''"""What it is.

Two paragraphs.
"""

X = 1
"""An attribute's docstring."""


def f() -> str:
    # A reason.
    return """
no docstring"""  # of the function
'''


def test_docstrings_and_comments_are_no_code() -> None:
    lines = count_lines(MODULE)
    assert (lines.modules, lines.code, lines.prose, lines.blank) == (1, 4, 6, 3)
    assert lines.all == len(MODULE.splitlines())


@pytest.mark.long
def test_an_episode_is_followed_through_the_server() -> None:
    routes = anyio.run(follow_episode)
    assert {"protocol/episode_tools.py", "driver_client/link.py", "episodes/calls.py"} <= routes["call"].files
    assert routes["call"].hand_offs >= 1
    assert "grading/grader.py" in routes["claim and evaluation"].files
    assert len(routes["opening"].files) > len(routes["call"].files)
