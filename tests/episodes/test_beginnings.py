"""What a plug-in can hang on the episodes of a server, and a server without plug-ins."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from decathlon_mcp import app
from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.beginnings import AgentSandbox, EpisodeHooks, Following, Start
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.specification import EpisodeSpec, Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.errors import BadRequestError, DecathlonError, SetUpError
from decathlon_mcp.hooks import Plugin
from decathlon_mcp.protocol.lobby_tools import StartEpisode
from tests.episodes.environment import TOOLS, ended, exits_with, make_call, running_registry
from tests.fakes.provider import FakeProvider

pytestmark = pytest.mark.anyio

PLAYER = Principal()


class Noted(EpisodeHooks):
    """Notes what it is asked, under its name. `failure`: raised when the set-up is done."""

    def __init__(self, name: str, notes: list[str], failure: DecathlonError | None = None) -> None:
        self.name, self.notes, self.failure = name, notes, failure

    def check(self, factory: SandboxFactory, spec: EpisodeSpec) -> None:
        if spec.labels.get("refused_by") == self.name:
            raise BadRequestError(f"{self.name} refuses it")

    async def begin(self, start: Start, following: Following) -> AgentSandbox:
        self.notes.append(f"{self.name} begins")
        agent = await following()
        assert agent.driver is not None
        await agent.driver.ping()
        self.notes.append(f"{self.name} has it {start.episode.state.phase}")
        if self.failure is not None:
            raise self.failure
        return agent

    def acting(self, start: Start, agent: AgentSandbox) -> AbstractAsyncContextManager[object]:
        return self._acting(start)

    @asynccontextmanager
    async def _acting(self, start: Start) -> AsyncGenerator[None]:
        self.notes.append(f"{self.name} acts")
        try:
            yield
        finally:
            self.notes.append(f"{self.name} is over {start.episode.state.phase}")


def with_hooks(patch: pytest.MonkeyPatch, *hooks: EpisodeHooks) -> None:
    """Servers have these hooks, and no others."""
    names = tuple(str(number) for number in range(len(hooks)))

    def load(name: str) -> Callable[..., EpisodeHooks]:
        return lambda *_: hooks[int(name)]

    patch.setattr(app, "plugins", lambda: (Plugin(name="test", episodes=names),))
    patch.setattr(app, "load", load)


async def test_links_begin_an_episode_from_the_first_to_the_last_and_know_when_it_is_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    with_hooks(monkeypatch, Noted("first", notes), Noted("last", notes))
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(tmp_path, provider) as registry:
        episode = registry.start("find-answer", PLAYER)
        await episode.ready()
        await make_call(episode, "probe__echo", CallParams.of({"text": "x"}))
        assert (await episode.evaluate()).reward == 1.0
    assert notes == [
        *("first begins", "last begins", "last has it opening", "first has it opening"),
        *("first acts", "last acts", "last is over claimed", "first is over claimed"),
    ]


async def test_a_link_that_fails_after_the_set_up_ends_its_episode_and_leaves_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    with_hooks(monkeypatch, Noted("only", notes, SetUpError("it cannot begin")))
    provider = FakeProvider(tools=TOOLS)
    async with running_registry(tmp_path, provider) as registry:
        episode = registry.start("find-answer", PLAYER)
        with pytest.raises(SetUpError, match="it cannot begin"):
            await episode.ready()
        await ended(episode)
        assert episode.state.ending is Ending.SET_UP_FAILED
        assert provider.machine.sandboxes == {}
    assert notes == ["only begins", "only has it opening"]


async def test_hooks_refuse_an_episode_before_anything_of_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_hooks(monkeypatch, Noted("first", []), Noted("last", []))
    async with running_registry(tmp_path, FakeProvider(tools=TOOLS)) as registry:
        for name in ("first", "last"):
            with pytest.raises(BadRequestError, match=f"{name} refuses it"):
                registry.start("find-answer", PLAYER, labels={"refused_by": name})
        assert registry.live == []
        assert registry.admission.queued == 0
        assert not (tmp_path / "state" / "episodes").exists()


async def test_a_server_without_plug_ins_plays_and_refuses_branches_and_saved_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "plugins", tuple)
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(tmp_path, provider, pool=1) as registry:
        episode = registry.start("find-answer", PLAYER)
        await episode.ready()
        await make_call(episode, "probe__echo", CallParams.of({"text": "x"}))
        for arguments in ({"branch_of": episode.id, "at": 1}, {"task": "find-answer", "snapshots": 1}):
            # The core's own tool; plug-ins add these arguments.
            with pytest.raises(BadRequestError, match="there is no such field"):
                StartEpisode.from_arguments(arguments)
        assert (await episode.evaluate()).reward == 1.0
        assert (registry.source.idle, registry.source.opening) == (0, 0)
        assert registry.events.listeners == []
