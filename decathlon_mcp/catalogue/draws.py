"""Which tasks: by split, by what they need, by difficulty; and drawing some of them.

Decided 2026-11-21: a draw is by the hash of seed and name, and not by a generator that is told the seed. So a
seed draws the same whatever the version of Python, and a task more or less (one that has become runnable)
changes no draw but those that it is drawn in. With an order, a draw is a place in that order: the seed is the
number of the place, so that a trainer's step is a seed, and whoever counts up walks from first to last.

Drawing tasks for whoever asks: the one way to them behind every address, tool and command.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Literal, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Needs, Task

Entry: TypeAlias = tuple[str, Suite, Task]
"""A task under the id that it is spelled by."""

Order = Literal["easy_first", "hard_first", "curriculum"]

KINDS = ("network", "credentials", "services")
"""Words for whatever of a kind a task needs."""


def _split(value: object) -> object:
    """`a,b` is two words, wherever words stand."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple):
        said = cast("Iterable[object]", value)
        return tuple(
            part for word in said for part in (word.split(",") if isinstance(word, str) else (word,))
        )
    return value


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
Share = Annotated[float, Field(ge=0, le=1)]


class Filters(BaseModel):
    """Which tasks are meant: those that all of this is true of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    split: str | None = Field(None, description="Only tasks of this split, e.g. `train`.")
    needs: Words = Field(
        (),
        description="Only tasks that need all of these: servers, local tools, hosted services by name, or "
        "`network`, `credentials`, `services`. `*` stands for anything.",
    )
    without: Words = Field((), description="Only tasks that need none of these; the same words.")
    search: str | None = Field(None, description="Only tasks whose id contains this.")
    min_pass_rate: Share | None = Field(None, description="Only tasks passed at least so often, 0 to 1.")
    max_pass_rate: Share | None = Field(None, description="Only tasks passed at most so often, 0 to 1.")
    order: Order | None = Field(
        None,
        description="By pass rate: `easy_first`, `hard_first`, or `curriculum`: easy first, but what is "
        "always passed last. Tasks without a figure come after all others.",
    )


class Draw(Filters):
    """Filters, and what makes a draw repeatable."""

    seed: int | None = Field(
        None,
        description="Makes the draw repeatable; with an `order` it is the place in it, from 0.",
    )


def filter_tasks(catalogue: Catalogue, wanted: Filters) -> list[Entry]:
    """The tasks that are meant, in the order that is asked for, else in the catalogue's.

    Raises BadRequestError for a split or a need that no task has, and for difficulties that are not known.
    """
    _check(catalogue, wanted)
    found = [(name, suite, task) for name, suite, task in catalogue if _fits(catalogue, wanted, name, task)]
    if wanted.order is not None:
        found.sort(key=lambda entry: _difficulty(catalogue, wanted.order, entry))
    return found


def draw_tasks(catalogue: Catalogue, wanted: Filters, *, seed: int, place: int, count: int = 1) -> list[str]:
    """The ids of `count` tasks that can run here, all different as long as there are enough.

    With an order, they are those from that place on, and past the last place comes the first; without one,
    the seed's. Raises BadRequestError where there is none to draw from.
    """
    entries = filter_tasks(catalogue, wanted)
    if wanted.order is None:
        names = _shuffled(entries, seed)
    else:
        ready = [name for name, suite, task in entries if not suite.missing(task)]
        start = place % len(ready) if ready else 0
        names = itertools.cycle([*ready[start:], *ready[:start]])
    found = list(itertools.islice(names, count))
    if not found and count:
        raise _nothing_to_draw(entries)
    return found


def words_of(needs: Needs) -> frozenset[str]:
    """What `needs` and `without` may call a task's needs."""
    kinds = {"network": needs.network, "credentials": needs.credentials, "services": needs.services}
    said = (kind for kind, is_needed in kinds.items() if is_needed)
    return frozenset((*needs.servers, *needs.local_tools, *needs.services, *said))


def _shuffled(entries: list[Entry], seed: int) -> Iterator[str]:
    """Those that can run here, in an order of the seed's; when all were there, anew in another."""
    for turn in itertools.count():
        tag = f"{seed}" if turn == 0 else f"{seed}+{turn}"
        some = False
        for name, suite, task in sorted(entries, key=lambda entry: _number(tag, entry[0])):
            if not suite.missing(task):
                some = True
                yield name
        if not some:
            return


def _number(tag: str, name: str) -> bytes:
    return hashlib.sha256(f"{tag}:{name}".encode()).digest()


def _fits(catalogue: Catalogue, wanted: Filters, name: str, task: Task) -> bool:
    if wanted.split is not None and wanted.split not in task.splits:
        return False
    if wanted.search is not None and wanted.search not in name:
        return False
    words = words_of(task.needs)
    if not all(_any(words, word) for word in wanted.needs) or any(_any(words, w) for w in wanted.without):
        return False
    if wanted.min_pass_rate is None and wanted.max_pass_rate is None:
        return True
    rate = catalogue.pass_rate(task)
    least, most = wanted.min_pass_rate or 0.0, 1.0 if wanted.max_pass_rate is None else wanted.max_pass_rate
    return rate is not None and least <= rate.share <= most


def _any(words: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(word, pattern) for word in words)


def _difficulty(catalogue: Catalogue, order: Order | None, entry: Entry) -> tuple[bool, bool, float]:
    rate = catalogue.pass_rate(entry[2])
    if rate is None:
        return True, False, 0.0
    mastered = order == "curriculum" and rate.passed == rate.attempts
    return False, mastered, rate.share if order == "hard_first" else -rate.share


def _check(catalogue: Catalogue, wanted: Filters) -> None:
    splits = sorted({split for _, _, task in catalogue for split in task.splits})
    if wanted.split is not None and wanted.split not in splits:
        raise BadRequestError(
            f"there is no split {wanted.split!r}; the splits are {', '.join(splits) or '(none)'}",
            splits=splits,
        )
    known = frozenset(KINDS).union(*(words_of(task.needs) for _, _, task in catalogue))
    for word in (*wanted.needs, *wanted.without):
        if not _any(known, word):
            named = sorted(known - {*KINDS})
            raise BadRequestError(
                f"no task here needs {word!r}; what they need is {', '.join((*KINDS, *named))}",
                needs=[*KINDS, *named],
            )
    if catalogue.pass_rates is None:
        for name in ("order", "min_pass_rate", "max_pass_rate"):
            if getattr(wanted, name) is not None:
                raise BadRequestError(
                    f"`{name}` goes by pass rates, and none are known here: they are read from a file of "
                    "verdicts, `--results FILE`"
                )


def _nothing_to_draw(entries: list[Entry]) -> BadRequestError:
    if not entries:
        return BadRequestError("no task is all of what was asked for; `list_tasks` says what there is")
    name, suite, task = entries[0]
    return BadRequestError(
        f"none of the {len(entries)} tasks that fit can run here; {name} {'; '.join(suite.missing(task))}"
    )


REMEMBERED = 1_000
"""Walks through an order that can still be gone on with; of more, the one begun first starts anew."""


class TaskSampler:
    """Remembers how far each walk through an order has come, as long as the server runs."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._walks: dict[tuple[str | None, Filters], int] = {}

    def take(self, wanted: Draw, *, token: str | None = None, count: int = 1) -> list[str]:
        """The ids of `count` tasks that can run here, all different as long as there are enough.

        The same for the same seed, see `suites/draws.py`. Without a seed a new draw each time: at random or,
        with an order, from where the last draw with this token and these filters has stopped. Raises
        BadRequestError for filters that do not fit, and where there is nothing to draw from.
        """
        if wanted.seed is not None:
            return draw_tasks(
                self._catalogue, wanted, place=wanted.seed * count, count=count, seed=wanted.seed
            )
        walk = (token, Filters.model_validate(wanted.model_dump(include=set(Filters.model_fields))))
        place = self._walks.get(walk, 0)
        found = draw_tasks(self._catalogue, wanted, place=place, count=count, seed=secrets.randbits(64))
        if wanted.order is not None:
            self._walks[walk] = place + count
            if len(self._walks) > REMEMBERED:
                del self._walks[next(iter(self._walks))]
        return found
