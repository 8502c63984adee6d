"""The addresses over plain HTTP: what is checked before MCP, sessions, capacity, tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import suppress

import anyio
import httpx2
import pytest
from mcp.shared.exceptions import MCPError

from decathlon_mcp.http.bodies import MAX_BODY_BYTES
from decathlon_mcp.types import JsonObject
from tests.http.messages import INITIALIZE
from tests.probe.clients import connected, playing
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


def connection_fails(message: str) -> pytest.RaisesGroup[MCPError]:
    """Expects an error while connecting, which the SDK's client wraps in exception groups."""
    return pytest.RaisesGroup(pytest.RaisesExc(MCPError, match=message), flatten_subgroups=True)


async def test_a_refused_request_gets_an_error_under_its_id(served: Served, http: httpx2.AsyncClient) -> None:
    response = await http.post(served.task("find-anwser"), json={**INITIALIZE, "id": "first"})
    assert (response.status_code, response.json()["id"]) == (200, "first")
    assert "find-answer" in response.json()["error"]["message"]
    assert response.json()["error"]["data"]["near"][0] == "find-answer"
    response = await http.post(served.episode("0" * 48), json=INITIALIZE)
    assert (response.status_code, response.json()["id"]) == (200, 1)
    assert "start a new one" in response.json()["error"]["message"]


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


@pytest.mark.parametrize("path", ["/", "/task/find-answer/mcp", "/tasks/find-answer"])
async def test_an_sdk_client_at_a_wrong_path_shows_the_right_ones(served: Served, path: str) -> None:
    with connection_fails("/tasks/TASK/mcp"):
        async with connected(served.url + path):
            pass


async def test_a_sessionless_client_at_a_task_falls_back_to_the_handshake(served: Served) -> None:
    async with connected(served.task("find-answer"), "sessionless") as client:
        assert client.protocol_version == "2025-11-25"
        assert (await client.call_tool("probe__echo", {"text": "hi"})).content[0].text == "hi"  # pyright: ignore


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
        assert "access-control-allow-origin" not in response.headers
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


async def test_evaluate_without_a_call_names_the_likely_cause(served: Served) -> None:
    async with playing(served, "find-answer", "task") as player:
        assert "opens a session for each" in (await player.call("evaluate")).content[1].text
    async with playing(served, "find-answer", "task") as player:
        await player.call("probe__echo", text="hello")
        assert "session" not in str((await player.call("evaluate")).content)


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
