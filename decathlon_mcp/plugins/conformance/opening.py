"""Checks of opening and ending sandboxes, also when cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio

from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.plugins.conformance.target import (
    Probe,
    ProviderUnderTest,
    pack,
    raises,
    receive_all,
    registered,
)


@registered()
async def first_process_answers_on_the_stream(target: ProviderUnderTest) -> None:
    """The first process receives what is sent, answers on the stream, and is Python 3.10 or later."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await Probe(sandbox).ping()
        await Probe(sandbox).ping()


@registered()
async def root_is_known_before_opening(target: ProviderUnderTest) -> None:
    """`Provider.root` gives the absolute root that the sandbox then has."""
    spec = target.new_spec()
    root = target.provider.root(spec)
    async with target.provider.open(spec) as sandbox:
        assert sandbox.root == root
        assert sandbox.root.is_absolute()
        assert sandbox.spec is spec


@registered()
async def environment_is_known_before_opening(target: ProviderUnderTest) -> None:
    """`Provider.environment` is the digest of the image that the sandbox then has; it stays the same."""
    environment = await target.provider.environment(target.image)
    async with target.provider.open(target.new_spec()) as sandbox:
        assert sandbox.image_digest in (None, environment)
    assert await target.provider.environment(target.image) == environment


@registered()
async def end_of_input_ends_the_first_process(target: ProviderUnderTest) -> None:
    """After `send_eof` the first process exits, the stream ends, and the cause is its exit code."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await Probe(sandbox).ping()
        assert await sandbox.cause_of_end() is None
        await sandbox.stream.send_eof()
        assert await receive_all(sandbox) == b""
        assert await sandbox.cause_of_end() == "exit code 0"


@registered()
async def nothing_is_left_after_exit(target: ProviderUnderTest) -> None:
    """When the context manager has exited, the sandbox is removed."""
    async with target.provider.open(target.new_spec()):
        assert await target.resources()
    await target.assert_nothing_left()


@registered()
async def error_inside_propagates_and_nothing_is_left(target: ProviderUnderTest) -> None:
    """An error raised while the sandbox is open comes out unchanged, and the sandbox is removed."""
    with raises(KeyError, "mine"):
        async with target.provider.open(target.new_spec()):
            raise KeyError("mine")
    await target.assert_nothing_left()


@registered()
async def name_in_use_is_refused(target: ProviderUnderTest) -> None:
    """A second sandbox of the same name is refused, and the first one is not affected."""
    spec = target.new_spec()
    async with target.provider.open(spec) as sandbox:
        with raises(BadRequestError, "already"):
            async with target.provider.open(spec):
                pass
        await Probe(sandbox).ping()


@registered(seconds=60)
async def many_sandboxes_open_and_end_at_once(target: ProviderUnderTest) -> None:
    """Twelve sandboxes open and answer side by side, then end in the same moment, half of them cancelled."""
    all_answered, to_be_cancelled = anyio.Event(), anyio.CancelScope()
    answered = 0

    async def one() -> None:
        nonlocal answered
        async with target.provider.open(target.new_spec()) as sandbox:
            await Probe(sandbox).ping()
            answered += 1
            if answered == 12:
                all_answered.set()
                to_be_cancelled.cancel()
            await all_answered.wait()

    async with anyio.create_task_group() as tasks:

        async def cancelled_ones() -> None:
            with to_be_cancelled:
                async with anyio.create_task_group() as cancelled:
                    for _ in range(6):
                        cancelled.start_soon(one)

        tasks.start_soon(cancelled_ones)
        for _ in range(6):
            tasks.start_soon(one)
    await target.assert_nothing_left()


@registered()
async def closed_sandbox_is_lost(target: ProviderUnderTest) -> None:
    """After its end, every method that needs the sandbox raises SandboxLostError."""
    async with target.provider.open(target.new_spec()) as sandbox:
        pass
    with raises(SandboxLostError):
        await sandbox.get(sandbox.root, target.scratch / "out.tar", 1 << 20)
    with raises(SandboxLostError):
        await sandbox.put(sandbox.root, pack())
    with raises(SandboxLostError):
        await sandbox.pause()


@registered(seconds=60)
async def sweep_removes_sandboxes_of_other_providers_only(target: ProviderUnderTest) -> None:
    """`sweep` removes this owner's sandboxes that another provider opened, and spares its own."""
    async with target.create_second() as second, second.open(target.new_spec()) as orphan:
        async with target.provider.open(target.new_spec()) as sandbox:
            assert await target.provider.sweep(target.owner) == 1
            assert await target.provider.sweep(target.owner) == 0
            assert await target.provider.sweep(f"not-{target.owner}") == 0
            await Probe(sandbox).ping()
        assert await receive_all(orphan) == b""
    await target.assert_nothing_left()


@registered(seconds=10)
async def ready_machine_passes_the_providers_own_check(target: ProviderUnderTest) -> None:
    """`Provider.check` finds this machine ready, with nothing to do."""
    findings = await target.provider.check(target.image)
    assert findings
    problems = [finding for finding in findings if not finding.ok or finding.cure]
    assert not problems, problems


@registered(seconds=120)
async def cancelled_opening_leaves_nothing(target: ProviderUnderTest) -> None:
    """An opening that is cancelled at any moment, by a cancel scope, leaves nothing behind."""

    async def cancel(opening: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await opening()

    await _cancel_at_stepped_moments(target, cancel)


@registered(seconds=120)
async def cancelled_task_leaves_nothing(target: ProviderUnderTest) -> None:
    """An opening whose asyncio task is cancelled at any moment leaves nothing behind."""

    # Frameworks cancel tasks themselves. Unlike a scope's, this cancellation ignores anyio's shields.
    async def cancel(opening: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
        task = asyncio.create_task(opening())
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise error

    await _cancel_at_stepped_moments(target, cancel)


async def _cancel_at_stepped_moments(
    target: ProviderUnderTest,
    cancel: Callable[[Callable[[], Coroutine[Any, Any, None]], float], Awaitable[None]],
) -> None:
    """Cancel an opening and its first answer after ever longer waits, until one is not cancelled."""
    finished = False

    async def opening() -> None:
        nonlocal finished
        async with target.provider.open(target.new_spec()) as sandbox:
            await Probe(sandbox).ping()
        finished = True

    for step in range(60):
        await cancel(opening, step * 0.012)
        # An exit that is itself cancelled does not wait until killed processes are gone.
        await target.wait_until_nothing_left()
        if finished and step > 5:
            return
    await opening()  # so slow that each was cancelled
