"""The addresses over plain HTTP: what is checked before MCP, sessions, capacity, tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp.shared.exceptions import MCPError

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.bodies import MAX_BODY_BYTES
from decathlon_mcp.json_limits import MAX_NODES
from decathlon_mcp.types import JsonObject
from tests.http.messages import ACCEPT, INITIALIZE
from tests.probe.clients import connected, playing, start
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio

JSON = {"Content-Type": "application/json"}
PAGE = "http://localhost:6274"
"""Origin of a page that may use the server."""


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    state = tmp_path_factory.mktemp("state")
    async with serving(state, provider="host", origins=(PAGE,)) as served:
        yield served


@pytest.fixture
async def http() -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(headers=ACCEPT, timeout=30) as http:
        yield http


def connection_fails(message: str) -> pytest.RaisesGroup[MCPError]:
    """Expects an error while connecting, which the SDK's client wraps in exception groups."""
    return pytest.RaisesGroup(pytest.RaisesExc(MCPError, match=message), flatten_subgroups=True)


async def wait_until_ended(served: Served, episode_id: str) -> None:
    await served.episodes._episodes[episode_id].state.reach(Phase.ENDED)  # pyright: ignore[reportPrivateUsage]


async def test_a_refused_request_gets_an_error_under_its_id(served: Served, http: httpx2.AsyncClient) -> None:
    response = await http.post(served.task("find-anwser"), json={**INITIALIZE, "id": "first"})
    assert (response.status_code, response.json()["id"]) == (200, "first")
    assert "find-answer" in response.json()["error"]["message"]
    assert response.json()["error"]["data"]["near"][0] == "find-answer"
    response = await http.post(served.episode("0" * 48), json=INITIALIZE)
    assert (response.status_code, response.json()["id"]) == (200, 1)
    assert "start a new one" in response.json()["error"]["message"]


async def test_json_over_the_limits_is_refused_under_the_requests_id(
    served: Served, http: httpx2.AsyncClient
) -> None:
    arguments: list[Any] = [None] * (MAX_NODES + 1)
    message: dict[str, Any] = {
        "jsonrpc": "2.0",
        "id": 5,
        "method": "tools/call",
        "params": {"arguments": arguments},
    }
    response = await http.post(served.lobby, json=message)
    assert (response.status_code, response.json()["id"]) == (200, 5)
    assert "error" in response.json()


@pytest.mark.parametrize("method", ["GET", "DELETE", "notification", "response", "too large"])
async def test_what_is_no_request_is_refused_with_a_status(
    served: Served, http: httpx2.AsyncClient, method: str
) -> None:
    url, status = served.task("find-anwser"), 404
    if method in ("GET", "DELETE"):
        # Without a session the SDK refuses; the episode is looked up first.
        response = await http.request(method, served.episode("0" * 48))
    elif method == "notification":
        response = await http.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
    elif method == "response":
        response = await http.post(url, json={"jsonrpc": "2.0", "id": 1, "result": {}})
    else:
        response, status = await http.post(url, content=b" " * (MAX_BODY_BYTES + 1), headers=JSON), 413
    assert response.status_code == status
    assert response.json()["id"] is None


async def test_an_sdk_client_shows_the_message_for_an_unknown_task(served: Served) -> None:
    with connection_fails("find-answer"):
        async with connected(served.task("find-anwser")):
            pass


@pytest.mark.parametrize("path", ["/", "/task/find-answer/mcp", "/tasks/find-answer"])
async def test_an_sdk_client_at_a_wrong_path_shows_the_right_ones(served: Served, path: str) -> None:
    with connection_fails("/tasks/TASK/mcp"):
        async with connected(served.url + path):
            pass


async def test_a_sessionless_client_at_a_task_falls_back_to_the_handshake(served: Served) -> None:
    async with connected(served.task("find-answer"), "sessionless") as client:
        assert client.protocol_version == "2025-11-25"
        assert (await client.call_tool("probe__echo", {"text": "hi"})).content[0].text == "hi"  # pyright: ignore


async def test_a_sessionless_request_at_a_task_is_rejected_with_the_supported_revisions(
    served: Served, http: httpx2.AsyncClient
) -> None:
    meta: dict[str, Any] = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    response = await http.post(
        served.task("find-answer"),
        json={"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": meta}},
        headers={"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/list"},
    )
    error = response.json()["error"]
    assert error["code"] == -32022
    assert "2025-11-25" in error["data"]["supported"]


async def test_a_session_of_one_path_is_unknown_at_another(served: Served, http: httpx2.AsyncClient) -> None:
    opened = await http.post(served.task("find-answer"), json=INITIALIZE)
    session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
    ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    assert (await http.post(served.task("find-answer"), json=ping, headers=session)).status_code == 200
    unknown = await http.post(served.lobby, json=ping, headers={"Mcp-Session-Id": "0" * 32})
    for url in (served.task("say-answer"), served.lobby):
        response = await http.post(url, json=ping, headers=session)
        assert response.status_code == unknown.status_code == 404
        assert response.json() == unknown.json()
    assert (await http.delete(served.task("find-answer"), headers=session)).status_code == 200


async def test_delete_ends_the_episode_at_once(served: Served, http: httpx2.AsyncClient) -> None:
    opened = await http.post(served.task("find-answer"), json=INITIALIZE)
    episode = served.episodes.live[-1]
    await episode.ready()
    await http.delete(
        served.task("find-answer"), headers={"Mcp-Session-Id": opened.headers["mcp-session-id"]}
    )
    await episode.state.reach(Phase.ENDED)
    assert episode.state.ending == "its client left before grading"
    assert served.episodes.admission.active == 0


async def test_initialize_names_the_episode_and_its_address(served: Served) -> None:
    async with connected(served.task("find-answer")) as client:
        result: Any = client.session.initialize_result
        info = result.meta["decathlon/episode"]
        async with connected(info["address"], "sessionless") as other:
            echo: Any = await other.call_tool("probe__echo", {"text": "hello"})
    assert echo.content[0].text == "hello"
    assert info["id"] in info["address"]


async def test_malformed_json_is_refused_without_affecting_other_clients(
    served: Served, http: httpx2.AsyncClient
) -> None:
    async with playing(served, "find-answer", "task") as player:
        response = await http.post(
            served.lobby, content=b'{"jsonrpc": "2.0", ', headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 400
        assert await player.text("probe__echo", text="unharmed") == "unharmed"


async def test_a_foreign_host_or_origin_is_refused(served: Served, http: httpx2.AsyncClient) -> None:
    foreign = await http.post(served.lobby, json=INITIALIZE, headers={"Host": "evil.example"})
    assert foreign.status_code == 421
    browser = await http.post(served.lobby, json=INITIALIZE, headers={"Origin": "http://evil.example"})
    assert browser.status_code == 403


async def test_a_page_of_an_allowed_origin_can_use_the_server(
    served: Served, http: httpx2.AsyncClient
) -> None:
    origin = {"Origin": PAGE}
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "mcp-session-id"}
    preflight = await http.options(served.lobby, headers={**origin, **wanted})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "mcp-session-id" in preflight.headers["access-control-allow-headers"]
    assert {"GET", "POST", "DELETE"} <= set(preflight.headers["access-control-allow-methods"].split(", "))
    for url in (served.lobby, served.task("no-such-task")):
        response = await http.post(url, json=INITIALIZE, headers=origin)
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "mcp-session-id" in response.headers["access-control-expose-headers"].lower()
    # Also a refusal, so that the page can show it.
    refused = await http.post(served.lobby, content=b"{}", headers={**origin, "Content-Type": "text/plain"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, PAGE)


async def test_a_page_of_the_servers_own_origin_can_use_it(served: Served, http: httpx2.AsyncClient) -> None:
    response = await http.post(served.lobby, json=INITIALIZE, headers={"Origin": served.url})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://localhost.evil.example",
        "http://localhost:1",
        "http://localhost",
        "null",
    ],
)
async def test_a_page_of_another_origin_is_refused(
    served: Served, http: httpx2.AsyncClient, origin: str
) -> None:
    wanted = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    preflight = await http.options(served.lobby, headers=wanted)
    response = await http.post(served.lobby, json=INITIALIZE, headers={"Origin": origin})
    assert (preflight.status_code, response.status_code) == (400, 403)
    for answer in (preflight, response):
        assert "access-control-allow-origin" not in answer.headers


FOREIGN: tuple[tuple[dict[str, str], int], ...] = (
    ({"Host": "evil.example"}, 421),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "null"}, 403),
)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/metrics"),
        ("GET", "/.well-known/decathlon-key"),
        *(
            (method, path)
            for method in ("GET", "POST", "DELETE")
            for path in ("/mcp", "/tasks/find-answer/mcp")
        ),
        ("POST", "/episodes"),
    ],
)
async def test_no_address_serves_a_foreign_page(
    served: Served, http: httpx2.AsyncClient, method: str, path: str
) -> None:
    before = set(served.episodes.live)
    content = b'{"task": "find-answer"}' if path == "/episodes" else None
    kind = {"Content-Type": "application/json"}
    for headers, status in FOREIGN:
        response = await http.request(method, served.url + path, content=content, headers={**kind, **headers})
        assert response.status_code == status, headers
    if method == "POST":
        for simple in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            response = await http.post(served.url + path, content=content, headers={"Content-Type": simple})
            assert response.status_code == 400, simple
    # An episode of an earlier test may end meanwhile.
    assert set(served.episodes.live) <= before


async def test_probes_are_answered_under_any_name(served: Served, http: httpx2.AsyncClient) -> None:
    for path in ("/healthz", "/readyz"):
        response = await http.get(
            served.url + path, headers={"Host": "10.0.0.1", "Origin": "http://evil.example"}
        )
        assert response.status_code == 200
        assert "access-control-allow-origin" not in response.headers


async def test_every_answer_ends_with_a_line_feed(served: Served, http: httpx2.AsyncClient) -> None:
    # A shell would print its prompt behind what curl printed.
    for path in ("/", "/healthz", "/readyz", "/metrics", "/nothing", "/mcp", "/tasks/none/mcp"):
        assert (await http.get(served.url + path)).text.endswith("\n"), path
    foreign = await http.post(served.lobby, json=INITIALIZE, headers={"Host": "evil.example"})
    unknown = await http.post(served.task("none"), json=INITIALIZE)
    opened = await http.post(served.lobby, json=INITIALIZE)
    headers = {"mcp-session-id": opened.headers["mcp-session-id"], "accept": "application/json"}
    listed: dict[str, object] = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    answers = [foreign, unknown, opened, await http.post(served.lobby, json=listed, headers=headers)]
    for answer in answers:
        assert answer.text.endswith("\n"), answer.text


async def test_health_reports_the_status(served: Served, http: httpx2.AsyncClient) -> None:
    response = await http.get(f"{served.url}/healthz")
    assert response.json()["status"] == "ok"


async def test_unknown_members_are_relayed_unchanged(served: Served, http: httpx2.AsyncClient) -> None:
    opened = await http.post(served.task("find-answer"), json=INITIALIZE)
    session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
    await http.post(
        served.task("find-answer"),
        json={"jsonrpc": "2.0", "method": "notifications/initialized"},
        headers=session,
    )
    response = await http.post(
        served.task("find-answer"),
        json={"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "probe__odd"}},
        headers=session,
    )
    assert response.headers["content-type"] == "application/json"
    result = response.json()["result"]
    assert result["content"][0] == {"type": "text", "text": "a hologram", "depth": 3, "frames": [1, 2]}
    assert result["content"][1]["colour"] == "blue"
    assert result["mood"] == "cheerful"
    assert result["_meta"] == {"probe/trace": "t-1"}
    await http.delete(served.task("find-answer"), headers=session)


async def test_a_tool_call_without_an_id_is_a_notification_and_is_not_carried_out(
    served: Served, http: httpx2.AsyncClient
) -> None:
    opened = await http.post(served.lobby, json=INITIALIZE)
    session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
    params = {"name": "start_episode", "arguments": {"task": "find-answer"}}
    before = len(served.episodes.live)
    response = await http.post(
        served.lobby, json={"jsonrpc": "2.0", "method": "tools/call", "params": params}, headers=session
    )
    assert response.status_code == 202
    # Messages of a session are dispatched in order.
    ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    assert (await http.post(served.lobby, json=ping, headers=session)).status_code == 200
    assert len(served.episodes.live) == before


async def test_a_full_server_refuses_with_a_retry_time(tmp_path: Path) -> None:
    async with serving(tmp_path, provider="host", max_sandboxes=1, max_queue=0) as served:
        async with playing(served, "find-answer", "task"), httpx2.AsyncClient(headers=ACCEPT) as http:
            response = await http.post(served.task("find-answer"), json=INITIALIZE)
            assert (response.status_code, response.json()["id"]) == (200, 1)
            assert 5 <= int(response.headers["retry-after"]) <= 15
            assert response.json()["error"]["data"]["retryAfterSeconds"] >= 5
            with connection_fails("ask again in"):
                async with connected(served.task("find-answer")):
                    pass
            assert len(served.episodes.live) == 1


async def test_concurrent_sessions_beyond_capacity_are_discarded(tmp_path: Path) -> None:
    async with serving(tmp_path, provider="host", max_sandboxes=1, max_queue=0) as served:
        url = served.task("find-answer")
        responses: list[httpx2.Response] = []
        async with httpx2.AsyncClient(headers=ACCEPT, timeout=60) as http:

            async def initialize() -> None:
                responses.append(await http.post(url, json=INITIALIZE))

            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(initialize)
            assert len(served.episodes.live) == 1
            refusals = [response for response in responses if "ask again in" in response.text]
            assert len(refusals) == 7
            for response in refusals:
                if session := response.headers.get("mcp-session-id"):
                    assert (await http.delete(url, headers={"mcp-session-id": session})).status_code == 404
            (accepted,) = [response for response in responses if response not in refusals]
            await http.delete(url, headers={"mcp-session-id": accepted.headers["mcp-session-id"]})


async def test_an_idle_episode_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, provider="host", idle_seconds=1) as served:
        started = await start(served, "find-answer")
        await wait_until_ended(served, started["episode"])
        async with connected(served.lobby) as lobby:
            status: Any = await lobby.call_tool("episode_status", {"episode": started["episode"]})
            with pytest.raises(MCPError, match="lease expired"):
                await lobby.call_tool(
                    "call_tool",
                    {"episode": started["episode"], "name": "probe__echo", "arguments": {"text": ""}},
                )
    assert status.structured_content["phase"] == "ended"
    assert "lease" in status.structured_content["ending"]


async def test_a_claimed_episode_is_graded_after_its_client_disappears(tmp_path: Path) -> None:
    async with serving(tmp_path, provider="host", idle_seconds=1) as served:
        async with playing(served, "find-answer", "task") as player:
            await player.call("probe__write", path="answer.txt", text="42")
            await player.call("claim_done")
        await wait_until_ended(served, player.episode_id)
        verdict = tmp_path / "episodes" / player.episode_id / "verdict.json"
        assert '"reward": 1.0' in verdict.read_text()


async def test_evaluate_without_a_call_names_the_likely_cause(served: Served) -> None:
    async with playing(served, "find-answer", "task") as player:
        assert "opens a session for each" in (await player.call("evaluate")).content[1].text
    async with playing(served, "find-answer", "task") as player:
        await player.call("probe__echo", text="hello")
        assert "session" not in str((await player.call("evaluate")).content)
    async with playing(served, "find-answer", "episode-handshake") as player:
        assert "session" not in str((await player.call("evaluate")).content)


async def test_calls_past_the_limit_close_the_attempt(tmp_path: Path) -> None:
    async with serving(tmp_path, provider="host", max_calls=2) as served:
        async with playing(served, "find-answer", "task") as player:
            await player.call("probe__write", path="answer.txt", text="42")
            await player.call("probe__echo", text="")
            third = await player.call("probe__echo", text="")
            assert third.is_error
            assert "limit of 2 tool calls" in third.content[0].text
            verdict = (await player.call("evaluate")).structured_content
    assert verdict["truncated"] is True
    assert verdict["reward"] == 1.0


async def test_with_policy_meta_the_reward_is_only_in_meta(tmp_path: Path) -> None:
    async with serving(tmp_path, provider="host", reward="meta") as served:
        async with playing(served, "find-answer", "task") as player:
            result = await player.call("evaluate")
    assert result.structured_content is None
    assert "0" not in result.content[0].text
    assert result.meta["decathlon/verdict"]["reward"] == 0.0


async def test_tokens_are_required_and_own_their_episodes(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    lines = [
        f"{name} {hashlib.sha256(f'{name}-secret'.encode()).hexdigest()} {role}"
        for name, role in (("ada", "player"), ("bob", "player"), ("root", "admin"))
    ]
    file.write_text("# clients\n" + "\n".join(lines) + "\n")

    def bearer(name: str) -> dict[str, Any]:
        return {"headers": {"Authorization": f"Bearer {name}-secret"}}

    async with serving(tmp_path / "state", provider="host", tokens=Tokens.read(file)) as served:
        async with httpx2.AsyncClient(headers=ACCEPT) as http:
            assert (await http.post(served.lobby, json=INITIALIZE)).status_code == 401
            wrong = await http.post(served.lobby, json=INITIALIZE, **bearer("eve"))
            assert wrong.status_code == 401
            opened = await http.post(served.task("find-answer"), json=INITIALIZE, **bearer("ada"))
            assert opened.status_code == 200
            episode = served.episodes.live[-1]
            await episode.ready()
            for name in ("ada", "bob", "root"):
                response = await http.post(served.episode(episode.id), json=INITIALIZE, **bearer(name))
                assert ("no such episode" in response.text) is (name == "bob"), name


@pytest.mark.parametrize(
    ("path", "message", "answer"),
    [("/healthz", None, b'"status":"ok"'), ("/mcp", INITIALIZE, b'"serverInfo"')],
    ids=["json", "events"],
)
async def test_a_client_of_http_1_0_gets_no_chunks(
    served: Served, path: str, message: JsonObject | None, answer: bytes
) -> None:
    body = b"" if message is None else json.dumps(message).encode()
    head = [
        f"{'GET' if message is None else 'POST'} {path} HTTP/1.0",
        f"host: {served.url.removeprefix('http://')}",
        "accept: application/json, text/event-stream",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    received = b""
    async with await anyio.connect_tcp(host, int(port)) as connection:
        await connection.send("\r\n".join([*head, "", ""]).encode() + body)
        with anyio.fail_after(20), suppress(anyio.EndOfStream):
            while True:
                received += await connection.receive()
    response_head, _, content = received.partition(b"\r\n\r\n")
    assert b" 200 " in response_head.splitlines()[0]
    assert b"chunked" not in response_head
    assert answer in content
    assert content.lstrip().startswith((b"{", b"event:"))
