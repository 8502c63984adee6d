"""Which tasks are meant, and drawing some of them: repeatable, without repeats, by difficulty."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.draws import Draw, Filters, draw_tasks, filter_tasks
from decathlon_mcp.catalogue.pass_rates import read_pass_rates
from decathlon_mcp.errors import BadRequestError, SettingsError
from tests.suites.conftest import Checkout

TEN = [f"task-{number}" for number in range(10)]


@pytest.fixture
def mixed(checkout: Checkout) -> Checkout:
    """A task of each kind of need."""
    for server in ("filesystem", "fetch", "emails", "github"):
        checkout.server(server)
    checkout.task("offline", servers=("filesystem",), local_tools=("claim_done", "python_execute"))
    checkout.task("online", servers=("filesystem", "fetch"))
    checkout.task("hosted", servers=("emails",))
    checkout.task("keyed", servers=("github",))
    return checkout


def catalogue(checkout: Checkout, verdicts: Iterable[dict[str, Any]] | None = None) -> Catalogue:
    if verdicts is None:
        return Catalogue([checkout.load()])
    file = checkout.write("results.jsonl", "\n".join(json.dumps(verdict) for verdict in verdicts))
    return Catalogue([checkout.load()], read_pass_rates(file))


def ids(catalogue: Catalogue, **wanted: Any) -> list[str]:
    return [name for name, _, _ in filter_tasks(catalogue, Filters.model_validate(wanted))]


def draw(catalogue: Catalogue, count: int = 1, *, place: int = 0, seed: int = 7, **wanted: Any) -> list[str]:
    return draw_tasks(catalogue, Draw.model_validate(wanted), seed=seed, place=place, count=count)


def ten(checkout: Checkout, verdicts: Iterable[dict[str, Any]] | None = None) -> Catalogue:
    for name in TEN:
        checkout.task(name)
    return catalogue(checkout, verdicts)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, ["hosted", "keyed", "offline", "online"]),
        ({"needs": ["filesystem"]}, ["offline", "online"]),
        ({"needs": ["filesystem", "network"]}, ["online"]),
        ({"needs": "filesystem,python_execute"}, ["offline"]),
        ({"needs": ["poste"]}, ["hosted"]),
        ({"needs": ["services"]}, ["hosted"]),
        ({"needs": ["credentials"]}, ["keyed"]),
        ({"needs": ["f*"]}, ["offline", "online"]),
        ({"without": ["network"]}, ["hosted", "offline"]),
        ({"without": ["credentials", "services"]}, ["offline", "online"]),
        ({"without": ["f*"], "needs": ["network"]}, ["keyed"]),
        ({"search": "o", "without": ["services"]}, ["offline", "online"]),
    ],
)
def test_tasks_are_told_apart_by_what_they_need(
    mixed: Checkout, wanted: dict[str, Any], found: list[str]
) -> None:
    assert ids(catalogue(mixed), **wanted) == found


@pytest.mark.parametrize("name", ["needs", "without"])
def test_a_need_that_no_task_has_is_answered_with_what_there_is(mixed: Checkout, name: str) -> None:
    with pytest.raises(
        BadRequestError, match="no task here needs 'netwrok'; what they need is network,"
    ) as no:
        ids(catalogue(mixed), **{name: ["netwrok"]})
    assert {"network", "credentials", "services", "poste", "python_execute"} <= set(no.value.data["needs"])


def test_a_split_that_is_not_there_is_answered_with_those_that_are(checkout: Checkout) -> None:
    checkout.write("suite.yaml", "splits: {easy: [find-paper], hard: []}\n")
    checkout.task()
    with pytest.raises(BadRequestError, match="there is no split 'train'; the splits are easy") as no:
        ids(catalogue(checkout), split="train")
    assert no.value.data["splits"] == ["easy"]


def test_a_seed_draws_the_same_and_another_something_else(checkout: Checkout) -> None:
    tasks = ten(checkout)
    assert draw(tasks, seed=3) == draw(tasks, seed=3)
    assert len({draw(tasks, seed=seed)[0] for seed in range(100)}) == 10


def test_a_draw_does_not_depend_on_python_or_on_where_the_checkout_lies(checkout: Checkout) -> None:
    assert draw(ten(checkout), 3, seed=7) == ["task-1", "task-2", "task-0"]


def test_a_task_that_comes_or_goes_changes_no_other_draw(checkout: Checkout) -> None:
    tasks = ten(checkout)
    before = {seed: draw(tasks, seed=seed)[0] for seed in range(100)}
    checkout.task("task-x")
    tasks = catalogue(checkout)
    after = {seed: draw(tasks, seed=seed)[0] for seed in range(100)}
    changed = {after[seed] for seed in before if before[seed] != after[seed]}
    assert changed == {"task-x"}


def test_a_sample_repeats_nothing_until_all_were_there(checkout: Checkout) -> None:
    tasks = ten(checkout)
    sample = draw(tasks, 25)
    assert sorted(sample[:10]) == sorted(sample[10:20]) == TEN
    assert sample[:10] != sample[10:20]
    assert set(Counter(sample).values()) == {2, 3}
    assert draw(tasks, 4) == sample[:4]


def test_only_what_can_run_here_is_drawn(mixed: Checkout) -> None:
    tasks = catalogue(mixed)
    assert set(draw(tasks, 8)) == {"offline", "online"}
    with pytest.raises(
        BadRequestError, match="none of the 1 tasks that fit can run here; keyed needs github"
    ):
        draw(tasks, needs=["github"])
    with pytest.raises(BadRequestError, match="no task is all of what was asked for"):
        draw(tasks, search="nothing")


def verdicts(**passes: str) -> list[dict[str, Any]]:
    """`+` is a success, `-` a failure, `?` an attempt without a verdict."""
    said = {"+": {"success": True}, "-": {"success": False}, "?": {}}
    return [{"task": f"task-{name[1:]}", **said[sign]} for name, signs in passes.items() for sign in signs]


KNOWN = verdicts(t1="+-", t2="++", t3="--", t4="++-?", t5="+-?--", t6="?")


def test_difficulty_is_a_pass_rate_and_tasks_without_one_come_last(checkout: Checkout) -> None:
    tasks = ten(checkout, KNOWN)
    unknown = ["task-0", "task-6", "task-7", "task-8", "task-9"]
    assert ids(tasks, order="easy_first") == ["task-2", "task-4", "task-1", "task-5", "task-3", *unknown]
    assert ids(tasks, order="hard_first") == ["task-3", "task-5", "task-1", "task-4", "task-2", *unknown]
    assert ids(tasks, order="curriculum") == ["task-4", "task-1", "task-5", "task-3", "task-2", *unknown]
    assert ids(tasks, min_pass_rate=0.25, max_pass_rate=0.5) == ["task-1", "task-5"]
    assert ids(tasks, max_pass_rate=0) == ["task-3"]


def test_with_an_order_a_draw_is_a_place_in_it(checkout: Checkout) -> None:
    tasks = ten(checkout, KNOWN)
    walk = ids(tasks, order="easy_first")
    assert [draw(tasks, order="easy_first", place=place)[0] for place in range(12)] == [*walk, *walk[:2]]
    assert draw(tasks, 4, order="easy_first", place=8) == [*walk[8:], *walk[:2]]
    assert draw(tasks, order="easy_first", place=-1) == walk[-1:]


@pytest.mark.parametrize("wanted", [{"order": "easy_first"}, {"min_pass_rate": 0.5}, {"max_pass_rate": 1}])
def test_without_results_nothing_is_said_of_difficulty(checkout: Checkout, wanted: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="--results FILE"):
        ids(ten(checkout), **wanted)


def test_results_may_be_lines_or_verdicts_as_the_server_keeps_them(checkout: Checkout) -> None:
    kept = {"task": "task-1", "suite": "checkout", "status": "scored", "success": True}
    crashed = {"task": "task-1", "suite": "checkout", "status": "timeout"}
    spelled = {"task": "checkout:task-1", "success": False}
    text = f"{json.dumps(kept, indent=2)}\n{json.dumps(crashed)}\n\n{json.dumps(spelled)}"
    rates = read_pass_rates(checkout.write("kept.json", text))
    found = rates.of("checkout", "task-1")
    assert found is not None
    assert (found.passed, found.attempts, found.share) == (1, 2, 0.5)
    assert rates.of("other", "task-1") is None
    assert rates.of("checkout", "task-2") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"task": "a", "success": true}\n{"task"', "line 2: not JSON"),
        ('\n\n{"task": 4}', "line 3: not a verdict"),
        ('{"task": "a", "success": "yes"}', "line 1: not a verdict"),
        ("[]", "line 1: an object was expected"),
    ],
)
def test_results_of_another_form_are_an_error_with_their_line(
    checkout: Checkout, text: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        read_pass_rates(checkout.write("results.jsonl", text))


def test_results_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--results: .*nothing\.jsonl: No such file"):
        read_pass_rates(tmp_path / "nothing.jsonl")


def test_results_of_a_suite_that_is_not_here_are_said_to_be_passed_over(
    checkout: Checkout, caplog: pytest.LogCaptureFixture
) -> None:
    ten(checkout, [{"task": "task-1", "suite": "renamed", "success": True}])
    (record,) = caplog.records
    assert "not here" in record.message
    assert getattr(record, "fields")["suites"] == ["renamed"]  # noqa: B009
