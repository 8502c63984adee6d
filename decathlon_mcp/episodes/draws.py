"""Drawing tasks for whoever asks: the one way to them behind every address, tool and command."""

from __future__ import annotations

import secrets

from decathlon_mcp.suites import Catalogue, Draw, Filters, drawn

REMEMBERED = 1_000
"""Walks through an order that can still be gone on with; of more, the one begun first starts anew."""


class Draws:
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
            return drawn(self._catalogue, wanted, place=wanted.seed * count, count=count, seed=wanted.seed)
        walk = (token, Filters.model_validate(wanted.model_dump(include=set(Filters.model_fields))))
        place = self._walks.get(walk, 0)
        found = drawn(self._catalogue, wanted, place=place, count=count, seed=secrets.randbits(64))
        if wanted.order is not None:
            self._walks[walk] = place + count
            if len(self._walks) > REMEMBERED:
                del self._walks[next(iter(self._walks))]
        return found
