"""The client without `async` and `await`: `from decathlon_client.sync import Decathlon`.

    with Decathlon("http://127.0.0.1:8765") as d, d.episode("tune-reactor") as e:
        print(e.call("lab__describe_reactor").text)
        print(e.evaluate().reward)

Every class here is a proxy of the asynchronous class of the same name, which runs in an event loop in a
thread of its own. A batch's player and `on_progress` are plain functions and run in threads. Ctrl-C does not
end them; their next call raises.
"""

# `sync.pyi` has the types. It is generated from the same source (`python -m tests.clients.stubs`), and a test
# compares the two.

from __future__ import annotations

import functools
import inspect
import math
import os
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from typing import Any, ClassVar, Self, cast
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal

import decathlon_client as asynchronous
from decathlon_client.resends import RESEND_SECONDS
from decathlon_client.task_groups import ThreadInterrupted

__all__ = ["Batch", "Decathlon", "Episode", "Lockstep", "Slot"]

FORWARDED = ("__iter__", "__len__", "__getitem__", "__repr__")


class _LoopThread:
    """An event loop in a thread of its own, and the proxies of the objects that live there."""

    def __init__(self, portal: BlockingPortal) -> None:
        self._portal = portal
        self._process = os.getpid()
        self._is_open = True
        self._proxies: WeakKeyDictionary[Any, SyncProxy] = WeakKeyDictionary()
        self._threads: anyio.CapacityLimiter | None = None

    @property
    def is_of_this_process(self) -> bool:
        """Whether the thread is there: a fork has only the thread that made it."""
        return os.getpid() == self._process

    def close(self) -> None:
        """Let every further use raise."""
        self._is_open = False

    def check(self) -> None:
        """Raise RuntimeError if nothing can run in the event loop any more, instead of waiting for ever."""
        if not self.is_of_this_process:
            raise RuntimeError("this Decathlon was opened before a fork: open one in each process")
        if not self._is_open:
            raise RuntimeError("this Decathlon is closed")

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a coroutine function in the event loop and return its result. Ctrl-C cancels it."""
        self.check()
        loop_args = [self.to_loop(arg) for arg in args]
        loop_kwargs = self.keywords_to_loop(kwargs)
        future = self._portal.start_task_soon(functools.partial(function, *loop_args, **loop_kwargs))
        try:
            return self.to_caller(future.result())
        except BaseException:
            future.cancel()
            raise

    @contextmanager
    def enter(self, manager: AbstractAsyncContextManager[Any]) -> Generator[Any]:
        """Enter an asynchronous context manager in the event loop."""
        self.check()
        portal_manager = self._portal.wrap_async_context_manager(manager)
        value = portal_manager.__enter__()
        failure: BaseException | None = None
        try:
            yield self.to_caller(value)
        except BaseException as error:
            # An event loop that receives a KeyboardInterrupt ends at once, without closing anything.
            failure = error if isinstance(error, Exception) else ThreadInterrupted()
            raise
        finally:
            # After a fork the other process closes it.
            if self.is_of_this_process:
                with suppress(ThreadInterrupted):
                    portal_manager.__exit__(type(failure) if failure else None, failure, None)

    def iterate(self, items: AsyncGenerator[Any]) -> Generator[Any]:
        """Iterate over an asynchronous generator in the event loop."""

        # A tuple, because a StopAsyncIteration must not pass through the portal.
        async def next_item() -> tuple[Any, ...]:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return ()

        try:
            while item := self.run(next_item):
                yield item[0]
        finally:
            if self.is_of_this_process:
                self.run(items.aclose)

    def to_caller(self, value: object) -> Any:
        """The value as the caller's thread may use it: with proxies for objects of the event loop."""
        original: Any = value
        if type(original) in (list, tuple):
            return type(original)(self.to_caller(item) for item in original)
        if type(original) is dict:
            items = cast("dict[Any, Any]", original)
            return {self.to_caller(key): self.to_caller(item) for key, item in items.items()}
        proxy_class = PROXIES.get(type(original))  # pyright: ignore[reportUnknownArgumentType]
        if proxy_class is None:
            return original
        # One proxy for each object, so that proxies can be compared and be keys of a dict.
        proxy = self._proxies.get(original)
        if proxy is None:
            proxy = self._proxies[original] = proxy_class.of(original, self)
        return proxy

    def to_loop(self, value: Any) -> Any:
        """The value as the event loop may use it: without proxies, and with functions called in threads.

        Of containers only the keys of mappings can be proxies: the slots of a lockstep.
        """
        if isinstance(value, SyncProxy):
            return value.original
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value)
            return {key.original if isinstance(key, SyncProxy) else key: item for key, item in items.items()}
        # Players are functions, partials and objects with `__call__`; an iterable of tasks is none of these.
        is_function = callable(value) and not isinstance(value, (type, Iterable))
        return self._in_thread(cast("Callable[..., Any]", value)) if is_function else cast("object", value)

    def keywords_to_loop(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call, each as the event loop may use it."""
        values = {name: self.to_loop(value) for name, value in keywords.items()}
        if values.get("on_progress") is not None:
            values["on_progress"] = _one_at_a_time(values["on_progress"])
        return values

    def _in_thread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A coroutine function that calls a plain function in a thread."""

        async def call(*args: Any) -> Any:
            if self._threads is None:
                # Without a limit: each player of a batch occupies a thread for as long as it plays.
                self._threads = anyio.CapacityLimiter(math.inf)
            bound = functools.partial(function, *(self.to_caller(arg) for arg in args))
            result = await anyio.to_thread.run_sync(bound, abandon_on_cancel=True, limiter=self._threads)
            if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
                # Nothing of its body has run: an attempt would be graded as if it had been played.
                if inspect.iscoroutine(result):
                    result.close()
                kind = type(result).__name__
                raise TypeError(
                    f"decathlon_client.sync calls plain functions, and this one returned {kind}: define it "
                    "without `async` and `yield`, or use decathlon_client"
                )
            return result

        return call


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine function whose calls run one after the other, in the order in which they were made."""
    # The SDK calls it in a task for each notification, and threads overtake each other.
    lock = anyio.Lock()

    async def call(*args: Any) -> Any:
        async with lock:
            return await function(*args)

    return call


class SyncProxy:
    """A proxy of `original`, which lives in the event loop's thread and is used there."""

    original_class: ClassVar[type]
    original: Any
    _loop: Any

    def __init_subclass__(cls, *, original_class: type) -> None:
        cls.original_class = original_class
        cls.__doc__ = original_class.__doc__
        for name, member in vars(original_class).items():
            if (name in FORWARDED or not name.startswith("_")) and inspect.isfunction(member):
                setattr(cls, name, _method(name, member))

    @classmethod
    def of(cls, original: object, loop: _LoopThread) -> Self:
        self = cls.__new__(cls)
        self.original, self._loop = original, loop
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "original":
            raise AttributeError(name)
        return self._loop.to_caller(getattr(self.original, name))


def _method(name: str, member: Callable[..., Any]) -> Callable[..., Any]:
    """The synchronous form of a coroutine function, generator, context manager or plain method."""

    @functools.wraps(member)
    def method(self: SyncProxy, *args: Any, **kwargs: Any) -> Any:
        loop = self._loop  # pyright: ignore[reportPrivateUsage]
        bound = getattr(self.original, name)
        if inspect.iscoroutinefunction(member):
            return loop.run(bound, *args, **kwargs)
        loop_args = [loop.to_loop(arg) for arg in args]
        result = bound(*loop_args, **loop.keywords_to_loop(kwargs))
        if inspect.isasyncgenfunction(member):
            return loop.iterate(result)
        if isinstance(result, AbstractAsyncContextManager):
            return loop.enter(cast("AbstractAsyncContextManager[Any]", result))
        return map(loop.to_caller, result) if name == "__iter__" else loop.to_caller(result)

    return method


class Episode(SyncProxy, original_class=asynchronous.Episode): ...


class Slot(SyncProxy, original_class=asynchronous.Slot): ...


class Lockstep(SyncProxy, original_class=asynchronous.Lockstep): ...


class Batch(SyncProxy, original_class=asynchronous.Batch): ...


class Decathlon(SyncProxy, original_class=asynchronous.Decathlon):
    def __init__(
        self, url: str | None = None, token: str | None = None, *, resend_seconds: float = RESEND_SECONDS
    ) -> None:
        self._set(asynchronous.Decathlon(url, token, resend_seconds=resend_seconds))

    @classmethod
    def embedded(cls, *args: Any, **settings: Any) -> Self:
        self = cls.__new__(cls)
        self._set(asynchronous.Decathlon.embedded(*args, **settings))
        return self

    def _set(self, original: asynchronous.Decathlon) -> None:
        self.original = original
        self._opened: _LoopThread | None = None
        self._stack = ExitStack()

    @property
    def _loop(self) -> _LoopThread:
        if self._opened is None:
            raise RuntimeError("this Decathlon is not open: use it in `with`")
        return self._opened

    def __enter__(self) -> Self:
        if self._opened is not None:
            raise RuntimeError("this Decathlon is open already")
        with ExitStack() as stack:
            loop = _LoopThread(stack.enter_context(_portal()))
            # Left before the portal, and after the client, which is closed through it.
            stack.callback(loop.close)
            stack.enter_context(loop.enter(self.original))
            self._stack, self._opened = stack.pop_all(), loop
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened = None
        self._stack.__exit__(*exception)


@contextmanager
def _portal() -> Generator[BlockingPortal]:
    """An event loop in a thread of its own. A fork has no such thread and leaves it alone."""
    # Not anyio's `start_blocking_portal`: its end waits for the thread, after a fork for ever.
    process, ready = os.getpid(), Future[BlockingPortal]()

    async def serve() -> None:
        async with BlockingPortal() as portal:
            ready.set_result(portal)
            await portal.sleep_until_stopped()

    def run() -> None:
        try:
            anyio.run(serve)
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run, name="decathlon-client", daemon=True)
    thread.start()
    portal, is_broken = ready.result(), True
    try:
        yield portal
        is_broken = False
    finally:
        if os.getpid() == process:
            portal.call(portal.stop, is_broken)
            thread.join()


PROXIES: dict[type, type[SyncProxy]] = {
    proxy.original_class: proxy for proxy in (Episode, Slot, Lockstep, Batch)
}
