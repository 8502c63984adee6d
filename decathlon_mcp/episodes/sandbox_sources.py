"""Where the sandboxes of episodes come from: of sources that have some ready, else they are opened cold."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol, TypeAlias

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.events import Events, Opening, SandboxTaken
from decathlon_mcp.sandboxes.base import Provider, Sandbox, SandboxSpec

Opened: TypeAlias = tuple[Sandbox, DriverClient]
OpenNew: TypeAlias = Callable[[SandboxSpec], AbstractAsyncContextManager[Opened]]
"""Opens a new sandbox and connects to its driver; both are gone on exit."""


class ReadySandbox(Protocol):
    """A sandbox that a source has opened, for one taker. `spec` has a name of its own."""

    spec: SandboxSpec

    @property
    def opened(self) -> Opened: ...

    async def remove(self) -> None:
        """Remove it and wait until it is gone, even if the caller is cancelled."""
        ...


class SandboxSource(Protocol):
    """What has sandboxes ready, inside `running`. `counted_as`: the name of its sandboxes in the metrics."""

    counted_as: Opening

    @property
    def idle(self) -> int:
        """Number of sandboxes that can be taken."""
        ...

    @property
    def opening(self) -> int:
        """Number of sandboxes that are being opened ahead."""
        ...

    def running(self) -> AbstractAsyncContextManager[object]:
        """Open sandboxes ahead in the body; on exit, remove all sandboxes of the source, taken ones too."""
        ...

    async def expect(self, provider: Provider, spec: SandboxSpec, open_new: OpenNew) -> None:
        """Episodes will need sandboxes of this specification."""
        ...

    async def take(
        self, provider: Provider, spec: SandboxSpec, open_new: OpenNew, *, image: str | None = None
    ) -> ReadySandbox | None:
        """Take a sandbox of this specification; None if there is none. It has another name.

        `open_new` opens more of this kind. `image`: the digest that the image of `spec` must have, if not the
        one that it has now.
        """
        ...

    def give_way(self) -> None:
        """Give places back, if there are more sandboxes than may be: an episode opens one of its own."""
        ...

    def close(self) -> None:
        """Open nothing ahead any more, and remove in the background what nobody has taken."""
        ...

    async def empty(self) -> None:
        """Close it and wait until what nobody has taken is gone."""
        ...


class SandboxSources:
    """The sources of one server, which are asked in turn."""

    def __init__(self, sources: Sequence[SandboxSource] = (), events: Events | None = None) -> None:
        self._sources = sources
        self._events = events

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """The sources have sandboxes in the body; on exit all of them are gone."""
        async with AsyncExitStack() as stack:
            for source in self._sources:
                await stack.enter_async_context(source.running())
            yield

    @property
    def idle(self) -> int:
        """Number of sandboxes that can be taken."""
        return sum(source.idle for source in self._sources)

    @property
    def opening(self) -> int:
        """Number of sandboxes that are being opened ahead."""
        return sum(source.opening for source in self._sources)

    async def expect(self, provider: Provider, spec: SandboxSpec, open_new: OpenNew) -> None:
        """Episodes will need sandboxes of this specification."""
        for source in self._sources:
            await source.expect(provider, spec, open_new)

    async def take(
        self, provider: Provider, spec: SandboxSpec, open_new: OpenNew, *, image: str | None = None
    ) -> ReadySandbox | None:
        """Take a sandbox of the first source that has one, as `SandboxSource.take`.

        None if there is none: then the sources have given way to a cold one.
        """
        for source in self._sources:
            ready = await source.take(provider, spec, open_new, image=image)
            if ready is not None:
                self._count(source.counted_as)
                return ready
        self._count("cold")
        self.give_way()
        return None

    def give_way(self) -> None:
        """Let the sources give back the place of a sandbox that is not theirs."""
        for source in self._sources:
            source.give_way()

    def close(self) -> None:
        """Open nothing ahead any more, and remove in the background what nobody has taken."""
        for source in self._sources:
            source.close()

    async def empty(self) -> None:
        """Close them and wait until what nobody has taken is gone."""
        self.close()
        for source in self._sources:
            await source.empty()

    def _count(self, opening: Opening) -> None:
        if self._events is not None:
            self._events.emit(SandboxTaken(opening))
