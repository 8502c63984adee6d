"""The same without an event loop: `from decathlon_client.sync import Decathlon`, and no `async`, no `await`.

    with Decathlon("http://127.0.0.1:8765") as d, d.episode("tune-reactor") as e:
        print(e.call("lab__describe_reactor").text)
        print(e.evaluate().reward)

Nothing is written twice: every class here is made from its asynchronous namesake, which runs in an event
loop in a thread of its own. `sync.pyi` tells the types; it is made from the same source, and a test compares
them. A player of a batch is a plain function and runs in a thread; so does `on_progress`. Neither is ended by
Ctrl-C: what it asks for after that raises.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from typing import Any, ClassVar, Self, cast
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal

import decathlon_client as asynchronous
from decathlon_client.close_budget import ThreadInterrupted

__all__ = ["Batch", "Decathlon", "Episode", "Lockstep", "Slot"]

FORWARDED = ("__iter__", "__len__", "__getitem__", "__repr__")


class _Loop:
    """An event loop in a thread, and the twins of what lives there."""

    def __init__(self, portal: BlockingPortal) -> None:
        self._portal = portal
        self._proxies: WeakKeyDictionary[Any, SyncProxy] = WeakKeyDictionary()
        self._threads: anyio.CapacityLimiter | None = None

    def run(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """What the coroutine function returns. Ctrl-C meanwhile cancels it."""
        there = [self.there(arg) for arg in args]
        given = {name: self.there(arg) for name, arg in named.items()}
        future = self._portal.start_task_soon(functools.partial(function, *there, **given))
        try:
            return self.here(future.result())
        except BaseException:
            future.cancel()
            raise

    @contextmanager
    def entered(self, opening: AbstractAsyncContextManager[Any]) -> Generator[Any]:
        manager = self._portal.wrap_async_context_manager(opening)
        opened = manager.__enter__()
        told: BaseException | None = None
        try:
            yield self.here(opened)
        except BaseException as error:
            # An event loop that meets a KeyboardInterrupt ends on the spot.
            told = error if isinstance(error, Exception) else ThreadInterrupted()
            raise
        finally:
            with suppress(ThreadInterrupted):
                manager.__exit__(type(told) if told else None, told, None)

    def iterated(self, items: AsyncGenerator[Any]) -> Generator[Any]:
        async def following() -> tuple[Any, ...]:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return ()

        try:
            while following_one := self.run(following):
                yield following_one[0]
        finally:
            self.run(items.aclose)

    def here(self, value: object) -> Any:
        """As the caller's thread is to see it."""
        managed: Any = value
        if type(managed) in (list, tuple):
            return type(managed)(self.here(item) for item in managed)
        if type(managed) is dict:
            return {self.here(key): self.here(item) for key, item in cast("dict[Any, Any]", managed).items()}
        kind = PROXIES.get(type(managed))  # pyright: ignore[reportUnknownArgumentType]
        if kind is None:
            return managed
        proxy = self._proxies.get(managed)
        if proxy is None:
            proxy = self._proxies[managed] = kind.of(managed, self)
        return proxy

    def there(self, value: Any) -> Any:
        """As the event loop's is to see it."""
        if isinstance(value, SyncProxy):
            return value.original
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value)
            return {self.there(key): self.there(item) for key, item in items.items()}
        if type(value) is list:
            return [self.there(item) for item in cast("list[Any]", value)]
        return self._called_back(value) if inspect.isroutine(value) or inspect.isfunction(value) else value

    def _called_back(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            if self._threads is None:
                self._threads = anyio.CapacityLimiter(math.inf)
            here = functools.partial(function, *(self.here(arg) for arg in args))
            return await anyio.to_thread.run_sync(here, abandon_on_cancel=True, limiter=self._threads)

        return call


class SyncProxy:
    """`original` lives in the event loop's thread, and is asked there."""

    made_from: ClassVar[type]
    original: Any
    _loop: _Loop

    def __init_subclass__(cls, *, made_from: type) -> None:
        cls.made_from = made_from
        cls.__doc__ = made_from.__doc__
        for name, member in vars(made_from).items():
            if (name in FORWARDED or not name.startswith("_")) and inspect.isfunction(member):
                setattr(cls, name, _method(name, member))

    @classmethod
    def of(cls, original: object, loop: _Loop) -> Self:
        self = cls.__new__(cls)
        self.original, self._loop = original, loop
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "original":
            raise AttributeError(name)
        return self._loop.here(getattr(self.original, name))


def _method(name: str, member: Callable[..., Any]) -> Callable[..., Any]:
    """What it is in the event loop decides what it is here."""

    @functools.wraps(member)
    def method(self: SyncProxy, *args: Any, **named: Any) -> Any:
        loop = self._loop  # pyright: ignore[reportPrivateUsage]
        bound = getattr(self.original, name)
        if inspect.iscoroutinefunction(member):
            return loop.run(bound, *args, **named)
        there = [loop.there(arg) for arg in args]
        told = bound(*there, **{key: loop.there(arg) for key, arg in named.items()})
        if inspect.isasyncgenfunction(member):
            return loop.iterated(told)
        if isinstance(told, AbstractAsyncContextManager):
            return loop.entered(cast("AbstractAsyncContextManager[Any]", told))
        return map(loop.here, told) if name == "__iter__" else loop.here(told)

    return method


class Episode(SyncProxy, made_from=asynchronous.Episode): ...


class Slot(SyncProxy, made_from=asynchronous.Slot): ...


class Lockstep(SyncProxy, made_from=asynchronous.Lockstep): ...


class Batch(SyncProxy, made_from=asynchronous.Batch): ...


class Decathlon(SyncProxy, made_from=asynchronous.Decathlon):
    def __init__(self, url: str, token: str | None = None) -> None:
        self._set(asynchronous.Decathlon(url, token))

    @classmethod
    def embedded(cls, *args: Any, **settings: Any) -> Self:
        self = cls.__new__(cls)
        self._set(asynchronous.Decathlon.embedded(*args, **settings))
        return self

    def _set(self, original: asynchronous.Decathlon) -> None:
        self.original = original
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._loop = _Loop(stack.enter_context(start_blocking_portal()))
            stack.enter_context(self._loop.entered(self.original))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *ending: Any) -> None:
        self._stack.__exit__(*ending)


PROXIES: dict[type, type[SyncProxy]] = {kind.made_from: kind for kind in (Episode, Slot, Lockstep, Batch)}
