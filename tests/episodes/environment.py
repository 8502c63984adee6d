"""A running registry over the fake provider, for the tests of this folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import yaml

from decathlon_mcp.app import create_registry, create_sandbox_factory, create_tool_lists
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.driver.stream import NO_RECONNECTION, ReconnectPolicy
from decathlon_mcp.episodes.call import Waiter
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.settings import read_settings
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.suite import Suite
from tests.fakes.driver import FakeCall, FakeRun, ProcessExit
from tests.fakes.provider import FakeProvider
from tests.probe.serving import SUITE


async def echo(call: FakeCall) -> str:
    return str(call.arguments.get("text", ""))


async def hang(call: FakeCall) -> str:
    await anyio.sleep_forever()
    return ""


async def die(call: FakeCall) -> str:
    """End the sandbox's first process, as the kernel does when memory runs out."""
    raise ProcessExit(out_of_memory=True)


TOOLS = {"probe": {"echo": echo, "hang": hang, "die": die}}


def exits_with(exit_code: int) -> Callable[[FakeRun], int]:
    """A `run` in which every process, and so every evaluator, ends with this exit code."""
    return lambda request: exit_code


@cache
def probe_suite() -> Suite:
    """The probe suite, read once. Tests change copies of it, see `suite_with`."""
    return load_suite(SUITE)


def sandbox_factory(
    tmp_path: Path,
    provider: FakeProvider,
    *,
    suite: str | Path = SUITE,
    caches: bool = False,
    **settings: Any,
) -> SandboxFactory:
    """The sandboxes of a suite over a fake provider. `caches`: tool lists are kept in `state/`."""
    loaded = probe_suite() if suite == SUITE else load_suite(suite)
    common = tmp_path / "common.tar"
    loaded.common_archive(common)
    factory = create_sandbox_factory(loaded, provider, common, read_settings(settings))
    factory = replace(factory, image="fake")
    return replace(factory, tool_lists=create_tool_lists(factory, tmp_path / "state")) if caches else factory


@asynccontextmanager
async def running_registry(
    tmp_path: Path,
    provider: FakeProvider,
    *,
    suite: str | Path = SUITE,
    caches: bool = False,
    reconnect: ReconnectPolicy = NO_RECONNECTION,
    **settings: Any,
) -> AsyncGenerator[EpisodeRegistry]:
    """A running registry with one suite; checks at its end that no sandbox is left."""
    factory = sandbox_factory(tmp_path, provider, suite=suite, caches=caches, **settings)
    factory = replace(factory, reconnect=reconnect)
    values = {"state": tmp_path / "state", "drain_seconds": 5, **settings}
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    registry = create_registry(
        Catalogue([factory.suite]),
        {factory.suite.name: factory},
        read_settings(values),
        scratch,
    )
    async with provider, registry.running():
        yield registry
    assert provider.machine.sandboxes == {}, "a sandbox is left"


def is_idle(episode: Episode) -> bool:
    """Whether no request keeps the episode from ending for idleness."""
    return episode.lease.deadline <= time.monotonic() + episode.spec.limits.idle_seconds


async def make_call(
    episode: Episode, name: str, params: CallParams, *, waiter: Waiter | None = None
) -> Reply:
    """Call a tool without a client and return the reply. Raises what `accept` and `reply_of` raise."""
    waiter = waiter or Waiter()
    call = await episode.calls.accept(name, params, waiter)
    try:
        return await episode.calls.reply_of(call, waiter)
    finally:
        call.remove(waiter, handed_over=True)


async def ended(episode: Episode) -> None:
    """Wait until the episode has ended."""
    await episode.state.reach(Phase.ENDED)


def suite_with(folder: Path, **fields: Any) -> Path:
    """A copy of the probe suite; `fields` are laid over the top level of its suite.yaml."""
    suite = folder / "suite"
    shutil.copytree(SUITE, suite)
    settings = yaml.safe_load((suite / "suite.yaml").read_text())
    (suite / "suite.yaml").write_text(json.dumps({**settings, **fields}))
    return suite
