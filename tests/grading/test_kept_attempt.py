"""`attempt.json`: everything that a later grading needs to know."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.regrade.kept_attempts import KeptAttempt
from decathlon_mcp.plugins.regrade.regrading import is_open
from decathlon_mcp.storage.kept_files import KeptFiles
from tests.grading.support import make_attempt

LAUNCH_TIME = datetime(2026, 11, 21, 9, 30, 1, 250, tzinfo=timezone(timedelta(hours=9)))


def kept() -> KeptAttempt:
    attempt = make_attempt(
        launch_time=LAUNCH_TIME,
        answer="the answer \ud800 ü",
        turns=12,
        started_at=datetime(2026, 11, 21, tzinfo=UTC),
        claimed_at=datetime(2026, 11, 21, 0, 1, tzinfo=UTC),
        tools={"files": [{"name": "read", "inputSchema": {"type": "object"}}]},
        image_digest="sha256:0",
        suite_changed=True,
        preprocess_failure="preprocess failed (exit code 3): no such table",
        truncated_by="calls",
    )
    return KeptAttempt(attempt=attempt, task_id="paper", language="cn", in_place=False, sealed=True)


@pytest.mark.parametrize(
    ("changes", "of_attempt", "message"),
    [
        ({"version": 2}, {}, "version 2; this release reads version 1"),
        ({"attempt": None}, {}, "damaged: .*attempt"),
        ({"language": "hope"}, {}, "damaged: Invalid enum value 'hope' - at `\\$.language`"),
        ({}, {"launch_time": "yesterday"}, "damaged: .*launch_time"),
        ({}, {"isolation": "hope"}, "damaged: Invalid enum value 'hope' - at `\\$.attempt.isolation`"),
        ({}, {"image_digest": 1}, "damaged: image_digest: Input should be a valid string"),
    ],
)
def test_a_file_of_another_version_or_a_damaged_one_is_an_error(
    changes: Any, of_attempt: Any, message: str
) -> None:
    values = kept().to_json()
    values["attempt"].update(of_attempt)
    with pytest.raises(BadRequestError, match=message):
        KeptAttempt.parse(json.loads(json.dumps({**values, **changes})))


def test_an_episode_without_a_row_is_open_until_its_room_for_a_verdict_is_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "episodes" / "one"
    folder.mkdir(parents=True)
    files = KeptFiles(folder)
    assert not is_open(folder)
    files.reserve_verdict()
    assert is_open(folder)
    files.write_verdict({"reward": 1.0})
    assert not is_open(folder)
