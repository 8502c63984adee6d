"""Tables that a click on a heading sorts: the heading is a link, so that it works without JavaScript."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from decathlon_mcp.plugins.page.rendering import query
from decathlon_mcp.plugins.page.site import Visit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sorting:
    """The order of a table, as the address names it: `sort=calls`, `sort=-calls` with the greatest first."""

    address: str
    """The page's, without a query."""
    parameters: Mapping[str, str | list[str]]
    """The other parameters of the query. A new order starts at the first page, so the cursor is left out."""
    columns: Mapping[str, str]
    """What can be sorted by, each with its order at the first click: with `-` the greatest first."""
    column: str
    descending: bool
    parameter: str = "sort"
    section: str = ""
    """Id of the section that the table is in, for a page that has several."""

    @classmethod
    def of(
        cls,
        visit: Visit,
        path: str,
        columns: Iterable[str],
        default: str,
        *,
        parameters: Mapping[str, str | list[str]],
        parameter: str = "sort",
        section: str = "",
    ) -> Sorting:
        """The order that a visit asks for. `columns`: as they are sorted at the first click.

        `default`: the order without the parameter, or with an unknown value of it.
        """
        known = {each.lstrip("-"): each for each in columns}
        wanted = visit.query(parameter)
        if wanted.lstrip("-") not in known or wanted.startswith("--"):
            wanted = default
        return cls(
            address=visit.site.href(path),
            parameters=parameters,
            columns=known,
            column=wanted.lstrip("-"),
            descending=wanted.startswith("-"),
            parameter=parameter,
            section=section,
        )

    @property
    def value(self) -> str:
        """What the address has for this order."""
        return f"-{self.column}" if self.descending else self.column

    def link(self, column: str) -> str:
        """The address that sorts by a column; for the sorted one, the other way round."""
        value = self.columns[column]
        if column == self.column:
            value = column if self.descending else f"-{column}"
        text = query({**self.parameters, self.parameter: value})
        return f"{self.address}?{text}{f'#{self.section}' if self.section else ''}"

    def sorted(self, rows: Iterable[T], keys: Mapping[str, Callable[[T], Any]]) -> list[T]:
        """The rows in this order. Those whose key is None come last, and equal ones stay as they are."""
        key = keys[self.column]
        keyed = [(key(row), row) for row in rows]
        known = [pair for pair in keyed if pair[0] is not None]
        known.sort(key=lambda pair: pair[0], reverse=self.descending)
        return [row for _, row in known] + [row for value, row in keyed if value is None]
