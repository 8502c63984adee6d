"""The addresses over plain HTTP: what is checked before MCP, sessions, capacity, tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import httpx2
import pytest

from decathlon_mcp.http.bodies import MAX_BODY_BYTES
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


async def test_a_refused_request_gets_an_error_under_its_id(served: Served, http: httpx2.AsyncClient) -> None:
    response = await http.post(served.task("find-anwser"), json={**INITIALIZE, "id": "first"})
    assert (response.status_code, response.json()["id"]) == (200, "first")
    assert "find-answer" in response.json()["error"]["message"]
    assert response.json()["error"]["data"]["near"][0] == "find-answer"
    response = await http.post(served.episode("0" * 48), json=INITIALIZE)
    assert (response.status_code, response.json()["id"]) == (200, 1)
    assert "start a new one" in response.json()["error"]["message"]


async def test_what_is_no_request_is_refused_with_a_status(served: Served, http: httpx2.AsyncClient) -> None:
    url = served.task("find-anwser")
    notification = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    for response, status in (
        (await http.get(served.episode("0" * 48)), 404),
        (await http.post(url, json=notification), 404),
        (await http.post(url, json={"jsonrpc": "2.0", "id": 1, "result": {}}), 404),
        (await http.post(url, content=b" " * (MAX_BODY_BYTES + 1), headers=JSON), 413),
    ):
        assert (response.status_code, response.json()["id"]) == (status, None)


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
