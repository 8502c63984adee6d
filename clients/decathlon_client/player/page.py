"""A screen of this application."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from textual.screen import Screen

if TYPE_CHECKING:
    from decathlon_client.player.app import PlayerApp

Result = TypeVar("Result")


class Page(Screen[Result]):
    """Knows which application it is of."""

    @property
    def player(self) -> PlayerApp:
        return cast("PlayerApp", self.app)
