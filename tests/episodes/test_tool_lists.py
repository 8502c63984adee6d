"""Cached tool lists, and servers that start later than their episode's set-up."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.app import create_tool_lists
from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.errors import EpisodeClaimedError, SandboxLostError, SetUpError
from tests.driver.peer import until
from tests.episodes.environment import (
    TOOLS,
    echo,
    ended,
    exits_with,
    make_call,
    running_registry,
    sandbox_factory,
    suite_with,
)
from tests.fakes.driver import FakeCall, Faults
from tests.fakes.provider import FakeProvider

pytestmark = pytest.mark.anyio

PLAYER = Principal()
SECOND_SERVER = "type: stdio\nname: second\nparams: {command: second, env: {KEY: '${token.key}'}}\n"


def two_servers(tmp_path: Path, **fields: Any) -> Path:
    """The probe suite; its task `find-answer` needs a second server."""
    suite = suite_with(tmp_path, **fields)
    (suite / "configs" / "mcp_servers" / "second.yaml").write_text(SECOND_SERVER.replace("${token.key}", ""))
    config = suite / "tasks" / "probe" / "find-answer" / "task_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "needed_mcp_servers": ["probe", "second"]}))
    return suite


class Scene:
    """A registry over a fake provider whose task has two servers with a tool `echo` each."""

    def __init__(self, registry: EpisodeRegistry, provider: FakeProvider, folder: Path) -> None:
        self.registry = registry
        self.provider = provider
        self.entries = folder / "state" / "tool-lists"

    async def ready(self) -> Episode:
        episode = self.registry.start("find-answer", PLAYER)
        with anyio.fail_after(20):
            await episode.ready()
        return episode

    async def play(self) -> None:
        """Play an episode that calls no tool."""
        episode = await self.ready()
        await episode.evaluate()
        episode.close()
        await ended(episode)
        self.provider.starts.clear()

    def kept(self) -> list[str]:
        return sorted(path.name for path in self.entries.glob("*"))


@asynccontextmanager
async def scene(
    tmp_path: Path,
    *,
    tools: dict[str, Any] | None = None,
    faults: Any = None,
    fields: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncGenerator[Scene]:
    provider = FakeProvider(
        tools=tools or {"probe": TOOLS["probe"], "second": {"echo": echo}}, run=exits_with(0), faults=faults
    )
    suite = two_servers(tmp_path, **(fields or {}))
    async with running_registry(tmp_path, provider, suite=suite, caches=True, **settings) as registry:
        yield Scene(registry, provider, tmp_path)


async def test_servers_start_with_their_first_call_once_the_lists_are_known(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        first = await on.ready()
        assert on.provider.starts == ["probe", "second"]
        second = await on.ready()
        assert on.provider.starts == ["probe", "second"]
        assert second.tools.offered is first.tools.offered  # one object for all episodes with these tools
        for _ in range(2):
            reply = await make_call(second, "second__echo", CallParams.of({"text": "late"}))
            assert reply.decoded()["result"]["content"][0]["text"] == "late"
        assert on.provider.starts == ["probe", "second", "second"]
        assert (await second.evaluate()).reward == 1.0


async def test_eager_servers_all_start_at_set_up_and_their_lists_are_kept(tmp_path: Path) -> None:
    async with scene(tmp_path, servers="eager") as on:
        for _ in range(2):
            await on.ready()
        assert on.provider.starts == ["probe", "second"] * 2
        assert len(on.kept()) == 1


async def test_servers_ahead_start_without_a_call_while_no_tool_is_called(tmp_path: Path) -> None:
    finish = anyio.Event()

    async def slow(call: FakeCall) -> str:
        await finish.wait()
        return ""

    tools = {"probe": {"slow": slow}, "second": {"echo": echo}}
    async with scene(tmp_path, tools=tools, servers="ahead") as on:
        await on.play()
        await on.ready()
        await until(lambda: on.provider.starts == ["probe", "second"])
        on.provider.starts.clear()
        # Holds the place of starts ahead, so that the call begins first.
        async with anyio.create_task_group() as tasks:
            async with on.registry.admission.set_ups:
                episode = on.registry.start("find-answer", PLAYER)
                await episode.tools.known()
            await episode.ready()
            tasks.start_soon(make_call, episode, "probe__slow", CallParams())
            while episode.calls.sent == 0:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            finish.set()
        assert on.provider.starts[0] == "probe"


@pytest.mark.parametrize(
    "fields",
    [
        {"servers": {"sec*": {"eager": True}}},
        {"tasks": {"find-answer": {"eager": True}}},
        {"tasks": {"find-answer": {"in_place": True}}},
    ],
)
async def test_suite_names_servers_that_start_at_set_up(tmp_path: Path, fields: Mapping[str, Any]) -> None:
    async with scene(tmp_path, fields=fields) as on:
        await on.play()
        await on.ready()
        assert on.provider.starts == (["second"] if "servers" in fields else ["probe", "second"])


async def test_other_tools_than_the_cached_ones_are_noticed_and_the_episode_keeps_its_list(
    tmp_path: Path,
) -> None:
    tools: dict[str, Any] = {"probe": TOOLS["probe"], "second": {"echo": echo}}
    async with scene(tmp_path, tools=tools) as on:
        await on.play()
        tools["second"] = {"echo": echo, "added": echo}
        episode = await on.ready()
        given = [tool["name"] for tool in (await episode.tools.known()).tools]
        await make_call(episode, "probe__echo", CallParams.of({"text": "same"}))
        assert len(on.kept()) == 1
        await make_call(episode, "second__echo", CallParams.of({"text": "still there"}))
        assert on.kept() == []
        assert [tool["name"] for tool in (await episode.tools.known()).tools] == given
        lines = map(json.loads, episode.trajectory.file.read_bytes().splitlines())
        (note,) = [line for line in lines if line["event"] == "note"]
        assert (note["role"], note["calls"], "server second" in note["text"]) == ("server", 1, True)
        on.provider.starts.clear()
        after = await on.ready()
        assert on.provider.starts == ["probe", "second"]
        assert "second__added" in [tool["name"] for tool in (await after.tools.known()).tools]


class FailingStarts(dict[str, str]):
    """Starts of a server that fail, as many as there are in `failures`."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    def get(self, name: str, default: Any = None) -> Any:
        if name != "second" or self.failures == 0:
            return default
        self.failures -= 1
        return "no memory"


async def test_server_that_never_starts_loses_an_episode_without_calls(tmp_path: Path) -> None:
    failing = FailingStarts()
    async with scene(tmp_path, faults=Faults(servers_that_fail=failing)) as on:
        await on.play()
        failing.failures = 2
        episode = await on.ready()
        with pytest.raises(SandboxLostError, match="server second did not come up; stderr: no memory"):
            await make_call(episode, "second__echo", CallParams.of({}))
        await ended(episode)
        assert episode.state.ending is Ending.SANDBOX_LOST
        verdict = await episode.evaluate()
        assert (verdict.status, verdict.reward) == ("sandbox_lost", None)
        # The next set-up starts all servers, and says what is wrong.
        failing.failures = 2
        assert on.kept() == []
        with pytest.raises(SetUpError, match="no memory"):
            await on.ready()


async def test_server_that_never_starts_forfeits_an_attempt_with_calls(tmp_path: Path) -> None:
    failing = FailingStarts()
    async with scene(tmp_path, faults=Faults(servers_that_fail=failing)) as on:
        await on.play()
        episode = await on.ready()
        await make_call(episode, "probe__echo", CallParams.of({"text": "something"}))
        failing.failures = 2
        with pytest.raises(EpisodeClaimedError, match="closed while the call ran"):
            await make_call(episode, "second__echo", CallParams.of({}))
        verdict = await episode.evaluate()
        assert (verdict.status, verdict.reward) == ("forfeited", 0.0)
        assert verdict.detail is not None
        assert "stderr: no memory" in verdict.detail


async def test_calls_that_wait_for_the_same_start_share_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        await on.play()
        episode = await on.ready()
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(make_call, episode, "second__echo", CallParams.of({"text": str(number)}))
        assert on.provider.starts == ["second"]


async def test_damaged_entry_is_removed_and_written_again(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        await on.play()
        (name,) = on.kept()
        good = (on.entries / name).read_bytes()
        for damaged in (good[:-1], b"[]"):
            (on.entries / name).write_bytes(damaged)
            await on.play()
            assert (on.entries / name).read_bytes() == good


async def test_key_changes_with_the_suite_and_the_image_but_not_with_credentials(tmp_path: Path) -> None:
    suite = two_servers(tmp_path)
    server = suite / "configs" / "mcp_servers" / "second.yaml"
    server.write_text(SECOND_SERVER)
    token_file = suite / "configs" / "token_key_session.py"

    async def key(image: str = "sha256:1", revision: str = "a") -> str | None:
        factory = sandbox_factory(tmp_path, FakeProvider(), suite=suite)
        lists = create_tool_lists(factory, tmp_path / "state")
        return await lists.key(factory.suite.tasks["find-answer"], revision, image)

    token_file.write_text("all_token_key_session = dict(key='one')\n")
    first = await key()
    token_file.write_text("all_token_key_session = dict(key='another, longer one')\n")
    assert await key() == first
    others = [await key(image="sha256:2"), await key(revision="b")]
    server.write_text(SECOND_SERVER.replace("KEY", "OTHER"))
    others.append(await key())
    assert len({first, *others}) == 4
