"""Choosing tasks: filters by split, needs and difficulty, and draws among the tasks that fit.

Every address, tool and command that chooses tasks uses this module.

Decided 2026-11-21: a draw is the lowest hash of seed and task id, not the output of a seeded generator. A
seed therefore draws the same task on every version of Python, and adding or removing a task (or making one
runnable) only changes the draws of that task. With an order, the seed is a position in that order, so that a
trainer can use its step as the seed and goes through the tasks from first to last.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.pass_rates import MAX_RATED, PassRates
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Needs, Task
from decathlon_mcp.validation import MAX_NAME_CHARACTERS, quoted

Entry: TypeAlias = tuple[str, Suite, Task]
"""A task with its catalogue id and its suite."""

Order = Literal["easy_first", "hard_first", "curriculum"]

KINDS = ("network", "credentials", "services")
"""Filter words for any need of a kind."""


MAX_SEED = 1 << 63
"""In numbers of thousands of digits, arithmetic is slow and conversion to text an error."""
MAX_FILTER_WORDS = 100
"""Words of `needs` and of `without`. Each is compared with every need of every task, as a pattern."""


def _split(value: object) -> object:
    """Split strings at commas: `a,b` is the same as two strings. Raises ValueError for too many words."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        # Before anything is split, because a request could hold millions of them.
        if len(items) + sum(item.count(",") for item in items if isinstance(item, str)) > MAX_FILTER_WORDS:
            raise ValueError(f"more than {MAX_FILTER_WORDS} words")
        return tuple(
            part for item in items for part in (item.split(",") if isinstance(item, str) else (item,))
        )
    return value


Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
CommaSeparated = Annotated[tuple[Name, ...], BeforeValidator(_split)]
Share = Annotated[float, Field(ge=0, le=1)]


class TaskFilter(BaseModel):
    """Conditions on tasks, all of which must hold, an order, and a seed for draws."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    split: Name | None = Field(None, description="Only tasks of this split, e.g. `train`.")
    needs: CommaSeparated = Field(
        (),
        description="Only tasks that need all of these: servers, local tools, hosted services by name, or "
        "`network`, `credentials`, `services`. `*` matches anything.",
    )
    without: CommaSeparated = Field((), description="Only tasks that need none of these.")
    search: Name | None = Field(None, description="Only tasks whose id contains this text.")
    min_pass_rate: Share | None = Field(None, description="Only tasks with at least this pass rate, 0 to 1.")
    max_pass_rate: Share | None = Field(None, description="Only tasks with at most this pass rate, 0 to 1.")
    pass_rate_run: Name | None = Field(
        None, description="Pass rates of now, of the graded episodes with this label `run`."
    )
    pass_rate_last: Annotated[int, Field(ge=1, le=MAX_RATED)] | None = Field(
        None, description="Pass rates of now, of each task's last so many graded episodes."
    )
    order: Order | None = Field(
        None,
        description="By pass rate: `easy_first`, `hard_first`, or `curriculum`: easy first, but tasks "
        "that are always passed last. Tasks without a pass rate come after all others.",
    )
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = Field(
        None,
        description="Seed that makes the draw repeatable; with an `order`, the position in it, from 0.",
    )


def rates_for(catalogue: Catalogue, filters: TaskFilter, token: str | None) -> PassRates | None:
    """The pass rates that these filters are about; None if none are known.

    The file of results has them, unless there is none or the filters ask for current pass rates: over this
    server's episodes, or over the token's with a token. Reads the store if it has to.
    """
    asks_for_now = filters.pass_rate_run is not None or filters.pass_rate_last is not None
    uses = filters.order is not None or filters.min_pass_rate is not None or filters.max_pass_rate is not None
    if catalogue.live_rates is None or not (asks_for_now or (uses and catalogue.pass_rates is None)):
        return catalogue.pass_rates
    return catalogue.live_rates(filters.pass_rate_run, filters.pass_rate_last, token)


def filter_tasks(catalogue: Catalogue, filters: TaskFilter, rates: PassRates | None = None) -> list[Entry]:
    """The tasks that fit, in the order of the filters, or else of the catalogue.

    `rates`: from `rates_for`; by default the file of results. Raises BadRequestError for a split or a need
    that no task has, and for conditions on pass rates if none are known.
    """
    rates = catalogue.pass_rates if rates is None else rates
    _validate(catalogue, filters, rates)
    entries = [(name, suite, task) for name, suite, task in catalogue if _fits(rates, filters, name, task)]
    if filters.order is not None:
        entries.sort(key=lambda entry: _difficulty(rates, filters.order, entry))
    return entries


def runnable_tasks(catalogue: Catalogue, filters: TaskFilter) -> list[str]:
    """The ids of the tasks that fit and can run here, as `filter_tasks`. Also raises if there is none."""
    entries = filter_tasks(catalogue, filters)
    names = [name for name, suite, task in entries if catalogue.is_runnable(suite, task)]
    if not names:
        raise BadRequestError("no task fits these filters and can run here")
    return names


def draw_tasks(
    catalogue: Catalogue,
    filters: TaskFilter,
    *,
    seed: int,
    position: int,
    count: int,
    rates: PassRates | None = None,
) -> list[str]:
    """The ids of `count` tasks that fit and can run here, all different if there are enough of them.

    With an order they are the tasks from `position` on, starting over after the last; without one they depend
    on the seed, and on the `rates`, as for `filter_tasks`. Raises BadRequestError if there is none to draw
    from.
    """
    entries = filter_tasks(catalogue, filters, rates)
    if filters.order is None:
        names = _shuffled(catalogue, entries, seed)
    else:
        runnable = [name for name, suite, task in entries if catalogue.is_runnable(suite, task)]
        start = position % len(runnable) if runnable else 0
        names = itertools.cycle([*runnable[start:], *runnable[:start]])
    drawn = list(itertools.islice(names, count))
    if not drawn and count:
        raise _nothing_to_draw(catalogue, entries)
    return drawn


def filter_words(needs: Needs) -> frozenset[str]:
    """The words of the filters `needs` and `without` that match a task with these needs."""
    kinds = {"network": needs.network, "credentials": needs.credentials, "services": needs.services}
    present = (kind for kind, is_needed in kinds.items() if is_needed)
    return frozenset((*needs.servers, *needs.local_tools, *needs.services, *present))


def _shuffled(catalogue: Catalogue, entries: list[Entry], seed: int) -> Iterator[str]:
    """The runnable tasks in an order that depends on the seed; then again, in another order each round."""
    for round_number in itertools.count():
        round_seed = f"{seed}" if round_number == 0 else f"{seed}+{round_number}"
        is_empty = True
        for name, suite, task in sorted(entries, key=lambda entry: _sort_key(round_seed, entry[0])):
            if catalogue.is_runnable(suite, task):
                is_empty = False
                yield name
        if is_empty:
            return


def _sort_key(seed: str, name: str) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def _fits(rates: PassRates | None, filters: TaskFilter, name: str, task: Task) -> bool:
    if filters.split is not None and filters.split not in task.splits:
        return False
    if filters.search is not None and filters.search not in name:
        return False
    words = filter_words(task.needs)
    if not all(_any_matches(words, pattern) for pattern in filters.needs):
        return False
    if any(_any_matches(words, pattern) for pattern in filters.without):
        return False
    if filters.min_pass_rate is None and filters.max_pass_rate is None:
        return True
    rate = None if rates is None else rates.of(task.suite, task.id)
    minimum = filters.min_pass_rate or 0.0
    maximum = 1.0 if filters.max_pass_rate is None else filters.max_pass_rate
    return rate is not None and minimum <= rate.share <= maximum


def _any_matches(words: Iterable[str], pattern: str) -> bool:
    return any(_matches(word, pattern) for word in words)


def _matches(word: str, pattern: str) -> bool:
    """Whether a word is the pattern, in which `*` stands for any text."""
    # Not `fnmatch`, which compiles each pattern to a regular expression, takes milliseconds for a long
    # pattern, and keeps 32,768 of them.
    first, *others = pattern.split("*")
    if not others:
        return word == pattern
    *middle, last = others
    if len(word) < len(first) + len(last) or not (word.startswith(first) and word.endswith(last)):
        return False
    place, end = len(first), len(word) - len(last)
    for part in middle:
        if (place := word.find(part, place, end)) < 0:
            return False
        place += len(part)
    return True


def _difficulty(rates: PassRates | None, order: Order | None, entry: Entry) -> tuple[bool, bool, float]:
    """A key to sort by: tasks without a pass rate are last."""
    rate = None if rates is None else rates.of(entry[2].suite, entry[2].id)
    if rate is None:
        return True, False, 0.0
    mastered = order == "curriculum" and rate.passed == rate.attempts
    return False, mastered, rate.share if order == "hard_first" else -rate.share


def _validate(catalogue: Catalogue, filters: TaskFilter, rates: PassRates | None) -> None:
    splits = sorted({split for _, _, task in catalogue for split in task.splits})
    if filters.split is not None and filters.split not in splits:
        raise BadRequestError(
            f"there is no split {quoted(filters.split)}; the splits are {', '.join(splits) or '(none)'}",
            splits=splits,
        )
    words = frozenset(KINDS).union(*(filter_words(task.needs) for _, _, task in catalogue))
    for pattern in (*filters.needs, *filters.without):
        if not _any_matches(words, pattern):
            valid = [*KINDS, *sorted(words - {*KINDS})]
            raise BadRequestError(
                f"no task here needs {quoted(pattern)}; what they need is {', '.join(valid)}", needs=valid
            )
    if rates is None or (rates.file is None and not rates):
        of_run = "" if filters.pass_rate_run is None else f" of run {quoted(filters.pass_rate_run)}"
        for name in ("order", "min_pass_rate", "max_pass_rate"):
            if getattr(filters, name) is not None:
                raise BadRequestError(
                    f"`{name}` needs pass rates, and none are known here: no episode{of_run} was graded, and "
                    "no file of verdicts is read (`--results FILE`)"
                )


def _nothing_to_draw(catalogue: Catalogue, entries: list[Entry]) -> BadRequestError:
    if not entries:
        return BadRequestError("no task fits all of the filters; `list_tasks` lists the tasks")
    name, suite, task = entries[0]
    missing = "; ".join(catalogue.missing_sentences(suite, task))
    return BadRequestError(f"none of the {len(entries)} tasks that fit can run here; {name} {missing}")


MAX_POSITIONS = 1_000
"""Remembered positions of one token; beyond that its oldest is forgotten, and that order starts over."""


class TaskSampler:
    """Draws tasks. Remembers the position in each order, for as long as the server runs."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._positions: dict[str | None, dict[TaskFilter, int]] = {}

    def take(self, draw: TaskFilter, *, token: str | None = None, count: int = 1) -> list[str]:
        """The ids of `count` tasks that fit and can run here, all different if there are enough of them.

        The same seed gives the same tasks. Without a seed they are random; with an order they follow the last
        draw of the same token and filters. Raises BadRequestError for invalid filters, and if there is none
        to draw from.
        """
        rates = rates_for(self._catalogue, draw, token)
        filters = TaskFilter.model_validate(draw.model_dump(include=set(TaskFilter.model_fields)))
        positions = self._positions.setdefault(token, {})
        if draw.seed is None:
            seed, position = secrets.randbits(64), positions.get(filters, 0)
        else:
            seed, position = draw.seed, draw.seed * count
        drawn = draw_tasks(self._catalogue, filters, seed=seed, position=position, count=count, rates=rates)
        if draw.order is not None and draw.seed is None:
            positions[filters] = position + count
            if len(positions) > MAX_POSITIONS:
                del positions[next(iter(positions))]
        return drawn
