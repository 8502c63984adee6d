"""Which tasks: what lists and draws go by, in the words of the lobby's tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypedDict

Order: TypeAlias = Literal["easy_first", "hard_first", "curriculum"]


class Filters(TypedDict, total=False):
    """Only tasks that all of this is true of.

    `needs` and `without`: servers, local tools, hosted services by name, or `network`, `credentials`,
    `services`; all of them, none of them; `*` stands for anything. `search`: what the id contains. Pass rates
    are 0 to 1 and known only to a server with `--results`; `order` goes by them.
    """

    needs: Sequence[str]
    without: Sequence[str]
    search: str | None
    min_pass_rate: float | None
    max_pass_rate: float | None
    order: Order | None


def said(**words: Any) -> dict[str, Any]:
    """As arguments of a tool: without what was left open."""
    listed = {
        name: [word] if isinstance(word := words[name], str) else list(word)
        for name in ("needs", "without")
        if words.get(name)
    }
    return {name: value for name, value in words.items() if value is not None and name not in listed} | listed
