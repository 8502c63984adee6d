"""Names that clients send, in messages: quoted, shortened, and compared with the valid ones.

A name can be as long as a request. Comparing it takes time that grows with its length times the other names',
and every message that repeats it is as long, also in logs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_NAME_CHARACTERS = 200
"""No name here is longer. Longer ones have no similar names and are not repeated in messages."""


def quoted(name: str) -> str:
    """The name in quotes, or its length if it is too long to be shown."""
    return repr(name) if len(name) < MAX_NAME_CHARACTERS else f"of {len(name):,} characters"


def similar(name: str, candidates: Iterable[str], *, count: int, cutoff: float = 0.6) -> list[str]:
    """At most `count` candidates that resemble the name, best first; none for a long name.

    `cutoff`: least similarity, 0 to 1, as in `difflib`.
    """
    if len(name) >= MAX_NAME_CHARACTERS:
        return []
    short = [candidate for candidate in candidates if len(candidate) < MAX_NAME_CHARACTERS]
    return difflib.get_close_matches(name, short, n=count, cutoff=cutoff)
