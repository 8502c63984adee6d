"""What the client does when the network, the server or its caller misbehaves."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import anyio
import pytest
from decathlon_client import (
    AccessDeniedError,
    AtCapacityError,
    ClientError,
    ConnectionLostError,
    Decathlon,
    Episode,
    EpisodeEndedError,
    ProtocolError,
)

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.http.authentication import Tokens, new_token
from tests.clients.processes import server_process
from tests.clients.relay import port_of, relayed
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio


class UnderWay:
    """A call that takes for ever, and is known to have reached its tool."""

    def __init__(self) -> None:
        self.begun = anyio.Event()

    async def call(self, e: Episode) -> None:
        await e.call("probe__count", {"to": 2, "pause": 100}, on_progress=self._hear)

    async def _hear(self, progress: float, total: float | None, message: str | None) -> None:
        self.begun.set()


async def test_a_call_whose_connection_is_cut_says_so_and_the_next_one_works(served: Served) -> None:
    async with relayed(served) as (relay, url), Decathlon(url) as d, d.episode("find-answer") as e:
        lost: list[ClientError] = []
        under_way = UnderWay()

        async def call() -> None:
            with pytest.raises(ConnectionLostError) as caught:
                await under_way.call(e)
            lost.append(caught.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await under_way.begun.wait()
            await relay.cut()
        assert lost[0].retryable
        assert (await e.call("probe__echo", {"text": "again"})).text == "again"
        assert len(await d.tasks(prompts=False)) == len(served.episodes.catalogue)


async def test_a_server_that_does_not_know_the_session_is_asked_in_a_new_one(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "first", provider="local") as first,
        serving(tmp_path / "second", provider="local") as second,
        relayed(first) as (relay, url),
        Decathlon(url) as d,
    ):
        relay.port = port_of(second)
        await relay.cut()
        async with d.episode("find-answer"):
            assert [len(server.episodes.live) for server in (first, second)] == [0, 1]


async def test_no_server_is_said_with_the_address(free_port: int) -> None:
    with pytest.raises(ConnectionLostError, match=f"no server answers at http://127.0.0.1:{free_port}/mcp"):
        async with Decathlon(f"http://127.0.0.1:{free_port}"):
            pass


async def test_another_kind_of_server_is_said_to_be_one(served: Served) -> None:
    with pytest.raises(ProtocolError, match="404"):
        async with Decathlon(f"{served.url}/elsewhere"):
            pass


@pytest.mark.parametrize("url", ["127.0.0.1:8765", "http://127.0.0.1/tasks/a/mcp", ""])
async def test_what_is_no_servers_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="not the address of a server"):
        Decathlon(url)


async def test_the_lobbys_address_will_do_as_well(served: Served) -> None:
    async with Decathlon(f"{served.url}/mcp") as d:
        assert await d.tasks(prompts=False)


async def test_leaving_ends_the_episode_at_once(served: Served) -> None:
    async with Decathlon(served.url) as d:
        async with d.episode("find-answer") as e:
            handle = e.id
            episode = next(each for each in served.episodes.live if each.id == handle)
        await episode.state.reach(Phase.ENDED)
        with pytest.raises(EpisodeEndedError) as caught:
            async with d.attach(handle):
                pass
    assert caught.value.reason == "closed by its client"


async def test_a_caller_cancelled_while_an_episode_opens_leaves_none_behind(served: Served) -> None:
    async with Decathlon(served.url) as d:
        before = set(served.episodes.live)
        with anyio.move_on_after(0.2) as scope:
            async with d.episode("late-server"):
                pass
        assert scope.cancelled_caught
        for episode in set(served.episodes.live) - before:
            await episode.state.reach(Phase.ENDED)


async def test_a_claimed_attempt_is_graded_though_its_client_leaves(served: Served) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        episode = next(each for each in served.episodes.live if each.id == e.id)
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        await e.claim_done()
    await episode.state.reach(Phase.ENDED)
    assert episode.verdict is not None
    assert episode.verdict.reward == 1.0


async def test_a_full_server_says_when_to_ask_again(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, provider="local", max_sandboxes=1, max_queue=0) as served,
        Decathlon(served.url) as d,
        d.episode("find-answer"),
    ):
        with pytest.raises(AtCapacityError, match="1 of 1 sandboxes") as caught:
            async with d.episode("find-answer"):
                pass
        assert caught.value.retryable
        assert 5 <= caught.value.retry_after_seconds <= 15


async def test_a_token_is_needed_where_the_server_has_some(tmp_path: Path) -> None:
    secret, line = new_token("player-one", "player")
    (tmp_path / "tokens").write_text(line)
    tokens = Tokens.read(tmp_path / "tokens")
    async with serving(tmp_path / "state", provider="local", tokens=tokens) as served:
        for wrong in (None, "guessed"):
            with pytest.raises(AccessDeniedError, match="a token is needed"):
                async with Decathlon(served.url, token=wrong):
                    pass
        async with Decathlon(served.url, token=secret) as d, d.episode("find-answer") as e:
            assert (await e.call("probe__echo", {"text": "in"})).text == "in"


async def test_a_reward_kept_from_the_model_reaches_the_client(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, provider="local", reward="meta") as served,
        Decathlon(served.url) as d,
        d.episode("find-answer") as e,
    ):
        assert (await e.evaluate()).reward == 0.0


async def test_the_claim_is_found_under_toolathlons_name(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, provider="local", names="toolathlon") as served,
        Decathlon(served.url) as d,
        d.episode("say-answer") as e,
    ):
        assert "local-claim_done" in [tool.name for tool in e.tools]
        await e.claim_done("forty-two")
        assert (await e.evaluate()).reward == 1.0


async def test_a_server_killed_in_a_call_leaves_no_caller_waiting(tmp_path: Path) -> None:
    async with server_process(tmp_path) as (process, url), Decathlon(url) as d:
        async with d.episode("find-answer") as e, anyio.create_task_group() as tasks:
            under_way = UnderWay()

            async def kill() -> None:
                await under_way.begun.wait()
                process.send_signal(signal.SIGKILL)

            tasks.start_soon(kill)
            with pytest.raises(ConnectionLostError):
                await under_way.call(e)


async def test_a_server_killed_while_grading_leaves_no_caller_waiting(tmp_path: Path) -> None:
    async with server_process(tmp_path) as (process, url), Decathlon(url) as d:
        async with d.episode("slow-verdict") as e, anyio.create_task_group() as tasks:

            async def kill() -> None:
                await anyio.wait_all_tasks_blocked()
                process.send_signal(signal.SIGKILL)

            tasks.start_soon(kill)
            with pytest.raises(ConnectionLostError):
                await e.evaluate()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
