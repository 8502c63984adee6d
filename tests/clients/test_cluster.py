"""Episodes on a cluster: nodes that are lost, freeze, are full or come back, and what is left of episodes.

`Scheduler` stands in for Ray Serve's proxy; tests/ray/three_nodes.py plays on a real Ray cluster.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx2
import pytest
from decathlon_client import (
    AtCapacityError,
    ConnectionLostError,
    Decathlon,
    Episode,
    NodeLostError,
    UnknownTaskError,
    cluster,
    opener,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from decathlon_mcp.background import background_tasks
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.http.authentication import Tokens, new_token
from decathlon_mcp.http.listening import listen
from decathlon_mcp.http.server import serve_http
from decathlon_mcp.plugins.cluster import held_episodes, node
from decathlon_mcp.plugins.cluster.node import Node
from tests.clients.relay import relayed
from tests.probe.serving import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class LostError(Exception):
    """The scheduler's connection to a node broke."""


class SchedulerNode:
    """A node as the scheduler has it. `starts`: the requests that it got."""

    def __init__(self, url: str, scheduler: Scheduler) -> None:
        self.url = url
        self.node = Node(url, scheduler.list_nodes)
        self.starts = 0
        self._frozen = anyio.Event()
        self._scopes: set[anyio.CancelScope] = set()

    def lose(self) -> None:
        """Break all responses off."""
        for scope in self._scopes:
            scope.cancel()

    def freeze(self) -> None:
        """Let all responses stay as they are, open."""
        self._frozen.set()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unless_frozen(message: Message) -> None:
            if self._frozen.is_set():
                await anyio.sleep_forever()
            await send(message)

        with anyio.CancelScope() as cancel_scope:
            self._scopes.add(cancel_scope)
            try:
                response = await self.node.answer(Request(scope, receive))
                await response(scope, receive, send_unless_frozen)
            finally:
                self._scopes.discard(cancel_scope)
        if cancel_scope.cancelled_caught:
            raise LostError


class Scheduler:
    """Nodes in turns. `statuses`: the first is the answer to the next request instead."""

    def __init__(self) -> None:
        self.nodes: list[SchedulerNode] = []
        self.statuses: list[int] = []
        self._next = 0

    async def list_nodes(self) -> list[str]:
        return [node.url for node in self.nodes]

    def remove(self, node: SchedulerNode) -> None:
        """The node is lost, and gets no further request."""
        self.nodes.remove(node)
        node.lose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.statuses:
            await PlainTextResponse("no", self.statuses.pop(0))(scope, receive, send)
            return
        node = self.nodes[self._next % len(self.nodes)]
        if scope["path"] == "/episodes":
            self._next += 1
            node.starts += 1
        await node.serve(scope, receive, send)


@asynccontextmanager
async def scheduling(*urls: str) -> AsyncGenerator[tuple[Scheduler, str]]:
    """A cluster of the servers at these URLs, and its own URL."""
    scheduler = Scheduler()
    scheduler.nodes = [SchedulerNode(url, scheduler) for url in urls]
    nodes = list(scheduler.nodes)
    listener = listen("127.0.0.1", 0)
    async with background_tasks() as tasks:
        ready, stop, stopped = anyio.Event(), anyio.Event(), anyio.Event()

        async def serve() -> None:
            app = Starlette(routes=[Route("/{path:path}", scheduler)])
            await serve_http(app, listener, drain=anyio.lowlevel.checkpoint, on_ready=ready.set, stop=stop)
            stopped.set()

        tasks.start_soon(serve)
        await ready.wait()
        try:
            yield scheduler, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            with anyio.CancelScope(shield=True):
                for node in nodes:
                    node.lose()
                    await node.node.aclose()
                await stopped.wait()


@dataclass(frozen=True, slots=True)
class Servers:
    """Two servers."""

    first: Served
    second: Served

    @property
    def urls(self) -> list[str]:
        return [self.first.url, self.second.url]


@pytest.fixture(scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Servers]:
    state = tmp_path_factory.mktemp("state")
    async with (
        serving(state / "first", provider="host") as first,
        serving(state / "second", provider="host") as second,
    ):
        yield Servers(first, second)


@asynccontextmanager
async def clustered(*served: Served) -> AsyncGenerator[tuple[Scheduler, Decathlon]]:
    """A client of a cluster of these servers, which leaves no episode."""
    async with scheduling(*(server.url for server in served)) as (scheduler, url), Decathlon(url) as d:
        yield scheduler, d
    for server in served:
        await without_episodes(server)


async def without_episodes(server: Served) -> None:
    for episode in server.episodes.live:
        await episode.state.reach(Phase.ENDED)
    assert server.episodes.admission.active == 0


async def solve(e: Episode) -> str:
    await e.call("probe__write", {"path": "answer.txt", "text": "42"})
    await e.claim_done()
    return e.address


def node_of(scheduler: Scheduler, e: Episode) -> SchedulerNode:
    return next(one for one in scheduler.nodes if e.address.startswith(f"{one.url}/"))


async def test_nodes_pass_labels_on(servers: Servers) -> None:
    async with scheduling(servers.first.url) as (_, url), httpx2.AsyncClient() as http:
        headers = {"Decathlon-Labels": "run=a%2Cb, step=7"}
        start = http.stream("POST", f"{url}/episodes", json={"task": "find-answer"}, headers=headers)
        async with start as response:
            started = json.loads(await anext(response.aiter_lines()))
            labels = servers.first.find(started["episode"]).spec.labels
            assert dict(labels) == {"run": "a,b", "step": "7"}
    await without_episodes(servers.first)


async def test_a_batch_is_played_on_all_nodes(servers: Servers) -> None:
    async with clustered(servers.first, servers.second) as (scheduler, d):
        async with d.batch(["find-answer"] * 6, concurrency=3, progress=False) as batch:
            results = [result async for result in batch.run(solve)]
        assert [result.reward for result in results] == [1.0] * 6
        assert [one.starts for one in scheduler.nodes] == [3, 3]
        played_at = [str(result.played) for result in results]
        assert {address.partition("/episodes/")[0] for address in played_at} == {
            servers.first.url,
            servers.second.url,
        }
        assert [task.id for task in await d.tasks(prompts=False)]


async def test_attempts_on_a_lost_node_are_played_again_on_another(servers: Servers) -> None:
    async with clustered(servers.first, servers.second) as (scheduler, d):
        lost_node, on_lost_node = scheduler.nodes[0], list[str]()
        playing = 0
        all_play = anyio.Event()

        async def player(e: Episode) -> None:
            nonlocal playing
            playing += 1
            if playing == 4:
                all_play.set()
            await all_play.wait()
            if lost_node in scheduler.nodes and node_of(scheduler, e) is lost_node:
                on_lost_node.append(e.public_id)
                if len(on_lost_node) == 2:
                    scheduler.remove(lost_node)
                await e.call("probe__sleep", {"seconds": 100, "note": "late"})
            await solve(e)

        async with d.batch(["find-answer"] * 4, concurrency=4, progress=False) as batch:
            results = [result async for result in batch.run(player)]
        assert [result.reward for result in results] == [1.0] * 4
        assert sorted(lost for result in results for lost in result.lost) == sorted(on_lost_node)
        assert not {result.episode for result in results} & set(on_lost_node)
        assert (batch.tally.scored, batch.tally.lost, batch.tally.playing) == (4, 0, 0)


async def test_a_node_that_is_silent_is_lost_and_nothing_waits_for_it(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_episodes, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(cluster, "SILENCE_SECONDS", 2.0)
    async with clustered(servers.first, servers.second) as (scheduler, d), d.episode("find-answer") as e:
        await anyio.sleep(2.5)
        assert (await e.call("probe__echo", {"text": "here"})).text == "here"
        node_of(scheduler, e).freeze()
        with anyio.fail_after(30):
            with pytest.raises(NodeLostError, match="silent"):
                await e.call("probe__sleep", {"seconds": 100, "note": "late"})
            with pytest.raises(NodeLostError):
                await e.truncate()
            with pytest.raises(NodeLostError):
                await e.act("probe__echo", {"text": "lost"})


async def test_a_start_that_no_node_answers_is_made_again(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "START_SECONDS", 2.0)
    monkeypatch.setattr(opener, "AWAY_PAUSE_SECONDS", 0.1)
    async with clustered(servers.first, servers.second) as (scheduler, d):
        frozen = scheduler.nodes[0]
        frozen.freeze()
        with pytest.raises(AtCapacityError, match="one does not answer"):
            async with d.episode("find-answer"):
                pass
        scheduler.statuses += [500, 503]
        async with d.episode("find-answer", tries=2, patience_seconds=60) as e:
            assert e.address.startswith(servers.second.url)
        assert frozen.starts == 1


async def test_refusals_of_a_node_and_of_the_scheduler_differ(servers: Servers, tmp_path: Path) -> None:
    async with clustered(servers.first) as (scheduler, d):
        with pytest.raises(UnknownTaskError) as caught:
            async with d.episode("find-answr"):
                pass
        assert "find-answer" in caught.value.near
        for status, error in ((503, AtCapacityError), (500, ConnectionLostError)):
            scheduler.statuses.append(status)
            with pytest.raises(error, match=str(status)):
                async with d.episode("find-answer"):
                    pass
    async with serving(tmp_path, provider="host", max_sandboxes=1, max_queue=0) as small:
        async with clustered(small) as (_, d), d.episode("find-answer"):
            with pytest.raises(AtCapacityError, match="sandbox"):
                async with d.episode("find-answer"):
                    pass


async def test_a_start_that_is_cancelled_leaves_nothing(servers: Servers) -> None:
    async with clustered(servers.first) as (_, d):
        with anyio.move_on_after(0.3):
            async with d.episode("endless-preprocess"):
                pass


async def test_a_server_that_does_not_come_back_is_lost(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "RETURN_SECONDS", 0.5)
    async with relayed(servers.first) as (relay, relay_url), scheduling(relay_url) as (_, url):
        async with Decathlon(url) as d, d.episode("find-answer") as e:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(relay.refuse)
                with pytest.raises(NodeLostError, match="broke off"):
                    await e.call("probe__sleep", {"seconds": 100, "note": "late"})
    await without_episodes(servers.first)


async def test_tokens_are_those_of_the_nodes(tmp_path: Path) -> None:
    secret, line = new_token("trainer", "player")
    (tmp_path / "tokens").write_text(line)
    tokens = Tokens.read(tmp_path / "tokens")
    async with serving(tmp_path / "state", provider="host", tokens=tokens) as served:
        async with scheduling(served.url) as (_, url), Decathlon(url, secret) as d:
            async with d.episode("find-answer") as e:
                assert served.find(e.id).spec.owner.token == "trainer"
                await solve(e)
        async with scheduling(served.url) as (_, url):
            with pytest.raises(Exception, match="token"):
                async with Decathlon(url):
                    pass


async def test_what_a_cluster_answers_to_others(servers: Servers) -> None:
    headers = {"Content-Type": "application/json"}
    async with scheduling(*servers.urls) as (_, url), httpx2.AsyncClient(headers=headers) as client:
        assert (await client.get(f"{url}/nodes")).json() == {"nodes": servers.urls}
        (targets,) = (await client.get(f"{url}/metrics/targets")).json()
        assert targets["targets"] == [
            one.url.removeprefix("http://") for one in (servers.first, servers.second)
        ]
        assert (await client.get(f"{url}/nothing")).status_code == 404
        assert "/nodes" in (await client.get(url)).text
        assert (await client.post(f"{url}/episodes", content=b" " * (5 << 20))).status_code == 413
        request = b'{"jsonrpc": "2.0", "id": 7, "method": "initialize", "params": {}}'
        answer = (await client.post(f"{url}/mcp", content=request)).json()
        assert answer["id"] == 7
        assert "/mcp" in answer["error"]["message"]
        assert answer["error"]["data"]["node"] in servers.urls


@pytest.mark.parametrize(("method", "path"), [("POST", "/episodes"), ("POST", "/mcp"), ("GET", "/nodes")])
async def test_a_foreign_page_cannot_use_a_cluster(servers: Servers, method: str, path: str) -> None:
    foreign: list[tuple[dict[str, str], int]] = [
        ({"Host": "evil.example"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:6274"}, 403),
        ({"Origin": "null"}, 403),
    ]
    if method == "POST":
        foreign += [({"Content-Type": kind}, 400) for kind in ("text/plain", "multipart/form-data", "")]
    async with scheduling(*servers.urls) as (_, url), httpx2.AsyncClient() as http:
        for headers, status in foreign:
            given = {"Content-Type": "application/json", **headers}
            response = await http.request(
                method, url + path, content=b'{"task": "find-answer"}', headers=given
            )
            assert response.status_code == status, headers
            assert "access-control-allow-origin" not in response.headers
        # A node is called by the address of whichever machine the client knows.
        response = await http.get(
            f"{url}/nodes", headers={"Host": "192.0.2.7:8000", "Origin": "http://192.0.2.7:8000"}
        )
        assert response.status_code == 200
    assert not [episode for served in (servers.first, servers.second) for episode in served.episodes.live]
