"""The catalogue: unique ids for all tasks of all suites, and suggestions for unknown ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.requirements import HostInfo
from decathlon_mcp.errors import SuiteError, UnknownTaskError
from decathlon_mcp.suites.suite import Suite
from tests.suites.conftest import Checkout


def suite(path: Path, *tasks: str) -> Suite:
    checkout = Checkout(path)
    for task in tasks:
        checkout.task(task)
    return checkout.load()


def test_an_id_that_two_suites_have_gets_the_suites_name(tmp_path: Path) -> None:
    catalogue = Catalogue([suite(tmp_path / "one", "a", "both"), suite(tmp_path / "two", "both", "c")])
    assert [name for name, _, _ in catalogue] == ["a", "one:both", "two:both", "c"]
    assert [(name, suite.name, task.id) for name, suite, task in catalogue] == [
        ("a", "one", "a"),
        ("one:both", "one", "both"),
        ("two:both", "two", "both"),
        ("c", "two", "c"),
    ]
    assert len(catalogue) == 4
    assert catalogue.find("two:both")[0].name == "two"
    assert catalogue.find("one:a")[1] is catalogue.find("a")[1]
    with pytest.raises(UnknownTaskError) as raised:
        catalogue.find("both")
    assert raised.value.data["near"] == ["one:both", "two:both"]


def test_an_unknown_id_is_an_error_with_similar_ids(tmp_path: Path) -> None:
    catalogue = Catalogue([suite(tmp_path / "one", "find-alita-paper", "find-other", "sales-accounting")])
    with pytest.raises(UnknownTaskError, match="'find-alita-papr'; did you mean find-alita-paper"):
        catalogue.find("find-alita-papr")
    with pytest.raises(UnknownTaskError) as raised:
        catalogue.find("Accounting")
    assert raised.value.data["near"] == ["sales-accounting"]
    with pytest.raises(UnknownTaskError) as raised:
        catalogue.find("zzz")
    assert raised.value.data["near"] == []
    assert raised.value.message == "there is no task 'zzz'"


def test_a_task_with_errors_is_listed_and_finding_it_raises_the_error(tmp_path: Path) -> None:
    (tmp_path / "one" / "tasks" / "finalpool" / "bad" / "docs").mkdir(parents=True)
    catalogue = Catalogue([suite(tmp_path / "one", "good")])
    assert [name for name, _, _ in catalogue] == ["bad", "good"]
    assert catalogue.find("good")[1].id == "good"
    with pytest.raises(SuiteError, match=r"task_config\.json"):
        catalogue.find("bad")


def test_two_suites_with_one_name_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="are both called 'same': give one a `name`"):
        Catalogue([suite(tmp_path / "x" / "same", "a"), suite(tmp_path / "y" / "same", "b")])


BERLIN = ZoneInfo("Europe/Berlin")
FRIDAY_THERE = datetime(2026, 11, 27, 1, 30, tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("zone", "requested", "text"),
    [
        (UTC, FRIDAY_THERE, "2026-11-27 00:30:00 Friday"),
        (
            BERLIN,
            datetime(2026, 11, 26, 18, 30, tzinfo=timezone(-timedelta(hours=6))),
            "2026-11-27 01:30:00 Friday",
        ),
        (BERLIN, datetime(2026, 7, 1, 12), "2026-07-01 12:00:00 Wednesday"),
    ],
)
def test_a_launch_time_is_what_the_clock_of_a_sandbox_shows(
    tmp_path: Path, zone: ZoneInfo, requested: datetime, text: str
) -> None:
    """The batch of a client sends its own time with its own offset."""
    played = suite(tmp_path / "one", "a")
    catalogue = Catalogue([played], host=HostInfo(zones={played.name: zone}))
    when = catalogue.launch_time(played, played.tasks["a"], requested)
    assert played.launch_time(when) == text
    now = catalogue.launch_time(played, played.tasks["a"])
    assert now.utcoffset() == datetime.now(zone).utcoffset()
