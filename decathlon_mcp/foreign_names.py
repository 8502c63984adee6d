"""Names that clients send, in messages: quoted, shortened, and compared with the valid ones.

A name can be as long as a request. Comparing it takes time that grows with its length times the other names',
and every message that repeats it is as long, also in logs.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable
from itertools import islice

MAX_NAME_CHARACTERS = 200
"""No name here is longer. Longer ones are not repeated in messages."""
MAX_SIMILAR_CHARACTERS = 100
MAX_CANDIDATES = 600
"""More than a suite has tasks. An agent may have named 2,000 tools, and call one that there is not again and
again."""
MAX_COMPARED = 16
"""Candidates that are compared exactly: two names of 100 characters can take a millisecond."""


def one_line(text: str) -> str:
    """The text on one line, with a sign in the place of each character that is not printed."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text.split()))


def quoted(name: str) -> str:
    """The name in quotes, or its length if it is too long to be shown."""
    return repr(name) if len(name) < MAX_NAME_CHARACTERS else f"of {len(name):,} characters"


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a message about an unknown name: the candidate that resembles it; empty if none does."""
    return "".join(f"; did you mean {near}?" for near in similar(name, candidates, count=1))


def similar(name: str, candidates: Iterable[str], *, count: int, cutoff: float = 0.6) -> list[str]:
    """At most `count` candidates that resemble the name, best first; none for a long name.

    Long candidates, and those after the first MAX_CANDIDATES, are passed over. `cutoff`: least similarity, 0
    to 1, as in `difflib`.
    """
    if len(name) > MAX_SIMILAR_CHARACTERS:
        return []
    matcher = difflib.SequenceMatcher(b=name)
    bounds: list[tuple[float, str]] = []
    for candidate in islice(candidates, MAX_CANDIDATES):
        if len(candidate) <= MAX_SIMILAR_CHARACTERS:
            matcher.set_seq1(candidate)
            if matcher.real_quick_ratio() >= cutoff and (bound := matcher.quick_ratio()) >= cutoff:
                bounds.append((bound, candidate))
    likely = [candidate for _, candidate in heapq.nlargest(MAX_COMPARED, bounds)]
    return difflib.get_close_matches(name, likely, n=count, cutoff=cutoff)
