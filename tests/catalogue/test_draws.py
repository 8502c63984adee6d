"""Filters and draws: repeatable, without repeats, by difficulty; pass rates from a file of verdicts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.draws import TaskFilter, draw_tasks, filter_tasks
from decathlon_mcp.catalogue.pass_rates import read_pass_rates
from decathlon_mcp.errors import BadRequestError, SettingsError
from tests.suites.conftest import Checkout

TEN = [f"task-{number}" for number in range(10)]


@pytest.fixture
def mixed(checkout: Checkout) -> Checkout:
    """A checkout with a task of each kind of need."""
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


def ids(catalogue: Catalogue, **filters: Any) -> list[str]:
    return [name for name, _, _ in filter_tasks(catalogue, TaskFilter.model_validate(filters))]


def draw(
    catalogue: Catalogue, count: int = 1, *, position: int = 0, seed: int = 7, **filters: Any
) -> list[str]:
    return draw_tasks(
        catalogue, TaskFilter.model_validate(filters), seed=seed, position=position, count=count
    )


def ten(checkout: Checkout, verdicts: Iterable[dict[str, Any]] | None = None) -> Catalogue:
    for name in TEN:
        checkout.task(name)
    return catalogue(checkout, verdicts)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, ["hosted", "keyed", "offline", "online"]),
        ({"needs": ["filesystem", "network"]}, ["online"]),
        ({"needs": "filesystem,python_execute"}, ["offline"]),
        ({"needs": ["poste"]}, ["hosted"]),
        ({"needs": ["credentials"]}, ["keyed"]),
        ({"needs": ["*f*l*y*e*m"]}, ["offline", "online"]),
        ({"without": ["network"]}, ["hosted", "offline"]),
        ({"search": "o", "without": ["services"]}, ["offline", "online"]),
    ],
)
def test_tasks_are_filtered_by_their_needs_and_ids(
    mixed: Checkout, filters: dict[str, Any], expected: list[str]
) -> None:
    assert ids(catalogue(mixed), **filters) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z]etwork",
        "network*k",
        "n*w*o*r*k*k",
    ],
)
def test_only_a_star_stands_for_other_text(checkout: Checkout, pattern: str) -> None:
    """Sets of characters made a regular expression of each pattern: half a second for one request."""
    checkout.task("online", servers=("fetch",))
    with pytest.raises(BadRequestError, match="no task here needs"):
        ids(catalogue(checkout), needs=[pattern])


def test_an_unknown_need_is_an_error_that_lists_the_valid_ones(mixed: Checkout) -> None:
    with pytest.raises(
        BadRequestError, match="no task here needs 'netwrok'; what they need is network,"
    ) as raised:
        ids(catalogue(mixed), needs=["netwrok"])
    assert {"network", "credentials", "services", "poste", "python_execute"} <= set(
        raised.value.data["needs"]
    )


def test_an_unknown_split_is_an_error_that_lists_the_splits(checkout: Checkout) -> None:
    checkout.write("suite.yaml", "splits: {easy: [find-paper], hard: []}\n")
    checkout.task()
    with pytest.raises(BadRequestError, match="there is no split 'train'; the splits are easy") as raised:
        ids(catalogue(checkout), split="train")
    assert raised.value.data["splits"] == ["easy"]


def test_a_draw_depends_on_nothing_but_seed_and_ids(checkout: Checkout) -> None:
    assert draw(ten(checkout), 3, seed=7) == ["task-1", "task-2", "task-0"]


def test_a_new_task_changes_only_its_own_draws(checkout: Checkout) -> None:
    tasks = ten(checkout)
    before = {seed: draw(tasks, seed=seed)[0] for seed in range(100)}
    checkout.task("task-x")
    tasks = catalogue(checkout)
    after = {seed: draw(tasks, seed=seed)[0] for seed in range(100)}
    changed = {after[seed] for seed in before if before[seed] != after[seed]}
    assert changed == {"task-x"}


def test_a_sample_repeats_no_task_before_all_were_drawn(checkout: Checkout) -> None:
    tasks = ten(checkout)
    sample = draw(tasks, 25)
    assert sorted(sample[:10]) == sorted(sample[10:20]) == TEN
    assert sample[:10] != sample[10:20]
    assert set(Counter(sample).values()) == {2, 3}
    assert draw(tasks, 4) == sample[:4]


def test_only_runnable_tasks_are_drawn(mixed: Checkout) -> None:
    tasks = catalogue(mixed)
    assert set(draw(tasks, 8)) == {"offline", "online"}
    with pytest.raises(
        BadRequestError, match="none of the 1 tasks that fit can run here; keyed needs github"
    ):
        draw(tasks, needs=["github"])
    with pytest.raises(BadRequestError, match="no task fits all of the filters"):
        draw(tasks, search="nothing")


def verdicts(**passes: str) -> list[dict[str, Any]]:
    """`+` is a success, `-` a failure, `?` an attempt that was not scored."""
    outcome = {"+": {"success": True}, "-": {"success": False}, "?": {}}
    return [{"task": f"task-{name[1:]}", **outcome[sign]} for name, signs in passes.items() for sign in signs]


KNOWN = verdicts(t1="+-", t2="++", t3="--", t4="++-?", t5="+-?--", t6="?")


def test_tasks_are_ordered_by_pass_rate_and_those_without_one_are_last(checkout: Checkout) -> None:
    tasks = ten(checkout, KNOWN)
    unknown = ["task-0", "task-6", "task-7", "task-8", "task-9"]
    assert ids(tasks, order="easy_first") == ["task-2", "task-4", "task-1", "task-5", "task-3", *unknown]
    assert ids(tasks, order="hard_first") == ["task-3", "task-5", "task-1", "task-4", "task-2", *unknown]
    assert ids(tasks, order="curriculum") == ["task-4", "task-1", "task-5", "task-3", "task-2", *unknown]
    assert ids(tasks, min_pass_rate=0.25, max_pass_rate=0.5) == ["task-1", "task-5"]
    assert ids(tasks, max_pass_rate=0) == ["task-3"]


def test_with_an_order_a_draw_is_a_position_in_it(checkout: Checkout) -> None:
    tasks = ten(checkout, KNOWN)
    ordered = ids(tasks, order="easy_first")
    assert [draw(tasks, order="easy_first", position=position)[0] for position in range(12)] == [
        *ordered,
        *ordered[:2],
    ]
    assert draw(tasks, 4, order="easy_first", position=8) == [*ordered[8:], *ordered[:2]]
    assert draw(tasks, order="easy_first", position=-1) == ordered[-1:]


@pytest.mark.parametrize("filters", [{"order": "easy_first"}, {"min_pass_rate": 0.5}])
def test_filters_by_difficulty_need_pass_rates(checkout: Checkout, filters: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="--results FILE"):
        ids(ten(checkout), **filters)


def test_results_may_be_json_lines_or_verdict_files(checkout: Checkout) -> None:
    scored = {"task": "task-1", "suite": "checkout", "status": "scored", "success": True}
    crashed = {"task": "task-1", "suite": "checkout", "status": "sandbox_lost"}
    with_suite = {"task": "checkout:task-1", "success": False}
    text = f"{json.dumps(scored, indent=2)}\n{json.dumps(crashed)}\n\n{json.dumps(with_suite)}"
    rates = read_pass_rates(checkout.write("results.json", text))
    rate = rates.of("checkout", "task-1")
    assert rate is not None
    assert (rate.passed, rate.attempts, rate.share) == (1, 2, 0.5)
    assert rates.of("other", "task-1") is None
    assert rates.of("checkout", "task-2") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"task": "a", "success": true}\n{"task"', "line 2: not JSON"),
        ('\n\n{"task": 4}', "line 3: not a verdict"),
    ],
)
def test_invalid_results_are_an_error_with_their_line(checkout: Checkout, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_pass_rates(checkout.write("results.jsonl", text))
