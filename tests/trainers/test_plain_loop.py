"""The plain loop with a fake model, and the other programs of `docs/training.md`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.pages import block
from tests.docs.snippets import run
from tests.probe.serving import Served
from tests.trainers.conftest import oracles

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PAGE = "docs/training.md"


async def test_the_plain_loop_plays_any_task_with_any_endpoint(served: Served, tmp_path: Path) -> None:
    program = block(PAGE, "Any endpoint, any trainer", "python")
    with oracles("audit-expenses") as url:
        environment = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
        output = await run(
            program, [sys.executable], url=served.url, folder=tmp_path, environment=environment
        )
    assert sorted(output.splitlines()) == ["audit-expenses 0.0 None"] * 2 + ["tune-reactor 1.0 None"] * 2
    assert served.episodes.live == []


@pytest.mark.long
async def test_a_rollout_needs_no_server_started_by_hand(tmp_path: Path) -> None:
    program = block("docs/verifiers.md", "A rollout of your own", "python")
    with oracles() as url:
        environment = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": "none",
            "XDG_STATE_HOME": str(tmp_path / "state"),
        }
        output = await run(program, [sys.executable], url=None, folder=tmp_path, environment=environment)
    assert output.splitlines()[-1].startswith("1.0 {'calls': ")


@pytest.mark.parametrize(
    ("heading", "last_line"),
    [
        ("Groups and pass@k", "1.0"),
        ("In lockstep", "[1.0, 1.0]"),
        ("In the hooks of a framework", "1.0"),
        ("Without an event loop", "[1.0, 1.0]"),
    ],
)
@pytest.mark.long
async def test_programs_of_the_page_print_the_expected_rewards(
    heading: str, last_line: str, served: Served, tmp_path: Path
) -> None:
    output = await run(block(PAGE, heading, "python"), [sys.executable], url=served.url, folder=tmp_path)
    assert output.splitlines()[-1] == last_line
    assert served.episodes.live == []
