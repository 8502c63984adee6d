"""What the client does when the network, the server or its caller misbehaves."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskStatus
from decathlon_client import (
    AtCapacityError,
    ConnectionLostError,
    Decathlon,
    Episode,
    EpisodeEndedError,
    RequestError,
    SetUpError,
    opener,
)

from decathlon_mcp.episodes import admission
from decathlon_mcp.episodes.state import Ending, Phase
from tests.clients.relay import port_of, relayed
from tests.ports import free_port
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio


async def test_a_cancelled_scope_around_the_client_closes_its_episodes(served: Served) -> None:
    handles: list[str] = []
    started = anyio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        started.set()

    async def call(e: Episode) -> None:
        await e.call("probe__count", {"to": 2, "pause": 100}, on_progress=on_progress)

    with anyio.CancelScope() as scope:
        async with (
            Decathlon(served.url) as d,
            d.episode("find-answer") as first,
            d.lockstep(["find-answer"]) as others,
            anyio.create_task_group() as tasks,
        ):
            handles = [first.id, *(slot.episode.id for slot in others)]
            tasks.start_soon(call, first)
            await started.wait()
            scope.cancel()
            await anyio.sleep_forever()
    for handle in handles:
        episode = served.find(handle)
        await episode.state.reach(Phase.ENDED)
        assert episode.state.ending is Ending.CLOSED


async def test_a_forgotten_session_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "first", provider="host") as first,
        serving(tmp_path / "second", provider="host") as second,
        relayed(first) as (relay, url),
        Decathlon(url) as d,
    ):
        relay.port = port_of(second)
        await relay.cut()
        async with d.episode("find-answer"):
            assert [len(server.episodes.live) for server in (first, second)] == [0, 1]


async def test_an_unreachable_server_is_reported_with_its_address() -> None:
    port = free_port()
    with pytest.raises(ConnectionLostError, match=f"no server answers at http://127.0.0.1:{port}/mcp"):
        async with Decathlon(f"http://127.0.0.1:{port}"):
            pass


async def test_a_wrong_path_of_the_server_is_refused_with_the_right_ones(served: Served) -> None:
    with pytest.raises(RequestError, match="the lobby is /mcp"):
        async with Decathlon(f"{served.url}/elsewhere"):
            pass


async def test_leaving_the_context_ends_the_episode_at_once(served: Served) -> None:
    async with Decathlon(served.url) as d:
        async with d.episode("find-answer") as e:
            handle = e.id
            episode = next(live for live in served.episodes.live if live.id == handle)
        await episode.state.reach(Phase.ENDED)
        with pytest.raises(EpisodeEndedError) as caught:
            async with d.attach(handle):
                pass
    assert caught.value.reason == "its client left before grading"


async def test_a_claimed_attempt_is_graded_after_its_client_leaves(served: Served) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        episode = next(live for live in served.episodes.live if live.id == e.id)
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        await e.claim_done()
    await episode.state.reach(Phase.ENDED)
    assert episode.verdict is not None
    assert episode.verdict.reward == 1.0


async def test_an_episode_waits_for_a_full_server_as_long_as_its_patience_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "RETRY_SECONDS", (0.05, 0.1))

    async def play_another(*, task_status: TaskStatus[None]) -> None:
        async with d.episode("find-answer"):
            task_status.started()
            await refused.wait()

    async with (
        serving(tmp_path, provider="host", max_sandboxes=1, max_queue=0) as served,
        Decathlon(served.url) as d,
        anyio.create_task_group() as tasks,
    ):
        refused = anyio.Event()
        await tasks.start(play_another)
        with pytest.raises(AtCapacityError, match="1 of 1 sandboxes") as caught:
            async with d.episode("find-answer", patience_seconds=0.2):
                pass
        assert caught.value.retryable
        refused.set()
        async with d.episode("find-answer", patience_seconds=60) as e:
            assert (await e.call("probe__echo", {"text": "in"})).text == "in"


async def test_a_failed_opening_is_tried_again_also_without_patience(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opener, "FIRST_PAUSE_SECONDS", 0.01)
    caplog.set_level("INFO", "decathlon.client")
    async with Decathlon(served.url) as d:
        with pytest.raises(SetUpError):
            async with d.episode("failing-preprocess", tries=3):
                pass
    assert caplog.text.count("Opening an episode again") == 2


async def test_claim_and_verdict_work_with_toolathlons_names_and_a_reward_hidden_from_the_model(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path, provider="host", names="toolathlon", reward="meta") as served,
        Decathlon(served.url) as d,
        d.episode("say-answer") as e,
    ):
        assert "local-claim_done" in [tool.name for tool in e.tools]
        await e.claim_done("forty-two")
        assert (await e.evaluate()).reward == 1.0


async def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for host in ("127.0.0.1", "localhost"):
        async with Decathlon(served.url.replace("127.0.0.1", host)) as d:
            assert await d.tasks(prompts=False)
