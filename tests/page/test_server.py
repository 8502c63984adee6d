"""The page of a running server: live episodes, events, control, and who learns what."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import anyio.to_thread
import httpx2
import pytest
from decathlon_client import Decathlon, Episode, SetUpError

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.plugins.page import access, page
from decathlon_mcp.plugins.page.control import ACTIONS
from decathlon_mcp.plugins.page.live import LiveFeed
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.types import public_id
from tests.history.stored_episodes import Call, Folder, Note
from tests.http.messages import tokens_of
from tests.page.sites import HTML, OWN, browser, page_over, sign_in
from tests.page.watching import ChangingServer, live_episode
from tests.probe.clients import playing
from tests.probe.serving import Served, module_server, serving

pytestmark = pytest.mark.anyio


served = module_server(provider="host", page=True)


@pytest.fixture
async def person(served: Served) -> AsyncGenerator[httpx2.AsyncClient]:
    """A browser whose user has presented the key."""
    headers = {**HTML, **OWN}
    async with httpx2.AsyncClient(base_url=served.url, headers=headers, timeout=30) as client:
        await sign_in(client, (served.state / "page-key").read_text().strip())
        yield client


async def test_results_of_a_batch_name_the_pages_of_their_episodes(
    served: Served, person: httpx2.AsyncClient
) -> None:
    async def play(e: Episode) -> str | None:
        return e.page

    tasks = ["find-answer", "failing-preprocess"]
    async with Decathlon(served.url) as d, d.batch(tasks, concurrency=1, progress=False, tries=1) as batch:
        played, failed = [result async for result in batch.run(play)]
    assert (played.reward, failed.reward) == (0.0, None)
    assert isinstance(failed.failure, SetUpError)
    for result in (played, failed):
        assert result.page == f"{served.url}/e/{result.episode}"
        assert (await person.get(f"/e/{result.episode}")).status_code == 200
    assert played.played == played.page


@pytest.mark.parametrize("tokens", [frozenset[str](), frozenset({"token.key"})], ids=["plain", "secret"])
async def test_an_episodes_page_has_what_its_servers_logged_unless_they_have_a_secret(
    served: Served, person: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, tokens: frozenset[str]
) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        assert (await e.call("probe__die", {})).is_error
        monkeypatch.setattr(Suite, "token_names", MagicMock(return_value=tokens))
        await e.evaluate()
        page = await person.get(f"/e/{e.public_id}")
    _, heading, logs = page.text.partition("What its servers logged")
    assert bool(heading) is not bool(tokens)
    assert ("probe: killed by its tool die" in logs.partition("</details>")[0]) is not bool(tokens)


@pytest.fixture
async def episode(served: Served) -> AsyncGenerator[str]:
    """The handle of a live episode that has called a tool."""
    async with playing(served, "find-answer", "episode-handshake") as player:
        await player.client.call_tool("probe__echo", {"text": "hi"})
        yield player.episode_id


async def snapshots(person: httpx2.AsyncClient) -> AsyncGenerator[dict[str, Any]]:
    async with person.stream("GET", "/page/live") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


async def test_events_tell_what_plays_now(served: Served, person: httpx2.AsyncClient, episode: str) -> None:
    events = snapshots(person)
    async for snapshot in events:
        rows = [each for each in snapshot["episodes"] if each["id"] == public_id(episode)]
        if not rows:  # made before the episode started
            continue
        (row,) = rows
        assert (row["phase"], row["calls"], row["replies"]) == ("ready", 1, 1)
        assert snapshot["live"] == len(snapshot["episodes"])
        assert episode not in json.dumps(snapshot)
        # The same snapshot.
        assert f'data-id="{public_id(episode)}"' in (await person.get("/")).text
        break
    served.find(episode).close()
    async for snapshot in events:
        if public_id(episode) not in json.dumps(snapshot):
            break
    await events.aclose()


async def test_one_token_does_not_take_all_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_OWN_STREAMS", 1)
    tokens = tokens_of(tmp_path, ann="controller", ben="controller")
    async with (
        serving(tmp_path / "state", provider="host", page=True, tokens=tokens) as served,
        httpx2.AsyncClient(base_url=served.url, headers={**HTML, **OWN}) as ann,
        httpx2.AsyncClient(base_url=served.url, headers={**HTML, **OWN}) as ben,
    ):
        await sign_in(ann, "ann")
        await sign_in(ben, "ben")
        events = snapshots(ann)
        await anext(events)
        assert (await ann.get("/page/live")).status_code == 503
        others = snapshots(ben)
        assert await anext(others)
        for each in (events, others):
            await each.aclose()


async def test_viewers_who_come_at_the_same_time_do_not_get_more_streams(
    served: Served, person: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MAX_STREAMS", 2)
    url = httpx2.URL(served.url)
    assert url.port is not None
    cookies = "; ".join(f"{name}={value}" for name, value in person.cookies.items())
    request = f"{{}} HTTP/1.1\r\nHost: {url.netloc.decode()}\r\nCookie: {cookies}\r\n\r\n"
    with ExitStack() as stack:
        viewers = [
            stack.enter_context(socket.create_connection((url.host, url.port), timeout=30)) for _ in range(6)
        ]
        for viewer in viewers:  # so that each has its connection
            viewer.sendall(request.format("HEAD /").encode())
            await anyio.to_thread.run_sync(viewer.recv, 4096)
        for viewer in viewers:  # all before the server, in this event loop, reads one
            viewer.sendall(request.format("GET /page/live").encode())
        replies = [await anyio.to_thread.run_sync(viewer.recv, 4096) for viewer in viewers]
    statuses = [reply.split(b" ", 2)[1] for reply in replies]
    assert sorted(statuses) == [b"200"] * 2 + [b"503"] * 4


async def test_a_live_episode_is_ended_when_that_was_confirmed(
    served: Served, person: httpx2.AsyncClient, episode: str, caplog: pytest.LogCaptureFixture
) -> None:
    form = {"episode": public_id(episode)}
    with caplog.at_level(logging.INFO, "decathlon.page"):
        assert "End this episode" in (await person.post("/page/end", data=form)).text
        assert served.find(episode).state.phase is Phase.READY
        await person.post("/page/end", data={**form, "sure": "yes"})
    await served.find(episode).state.reach(Phase.ENDED)
    (record,) = caplog.records
    assert vars(record)["fields"] == {"token": None, "episode": public_id(episode)}


async def test_a_run_is_pinned_and_deleted(served: Served, person: httpx2.AsyncClient) -> None:
    handles = ["d" * 48, "e" * 48]
    with Folder(served.state) as folder:
        for handle in handles:
            folder.add(handle, labels={"run": "probe run"})
    form = {"run": "probe run", "sure": "yes"}
    for action, pinned in (("pin", True), ("unpin", False)):
        await person.post("/page/run", data={**form, "action": action})
        assert ('class="pin"' in (await person.get("/runs/probe%20run")).text) is pinned
    asked = await person.post("/page/run", data={"run": "probe run", "action": "delete"})
    assert "Delete the 2 finished episodes" in asked.text
    folders = [served.state / "episodes" / handle for handle in handles]
    assert all(folder.is_dir() for folder in folders)
    await person.post("/page/run", data={**form, "action": "delete"})
    assert not any(folder.exists() for folder in folders)
    assert (await person.get("/runs/probe%20run")).status_code == 404


ROLES = {"admin": "admin", "owner": "controller", "other": "controller", "gamer": "player"}


async def test_nobody_learns_what_is_not_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "WRONG_SECONDS", 0.01)
    tokens = tokens_of(tmp_path, **ROLES)
    with Folder(tmp_path) as folder:
        handle = "abc123" * 8
        name = folder.add(
            handle,
            token="owner",
            labels={"run": "secret-run"},
            task="secret-task",
            reward=0.4321,
            entries=[Note("the-answer"), Call(reply="the-answer"), Call(reply="the-answer", failed=True)],
            verdict={"evaluator_output": "the-answer"},
        )
    own: dict[str, Any] = {"public_id": name, "task": "secret-task", "run": "secret-run", "owner": "owner"}
    # It stops, so that a stream of events has one event at most.
    is_stopping = partial(next, cycle((False, True)))
    live = LiveFeed(ChangingServer(live_episode(1, **own)).snapshot, is_stopping)
    paths = [
        "/", "/runs", "/runs/secret-run", "/runs?name=secret-run", "/episodes", "/episodes?run=secret-run",
        "/episodes?show=failed", "/compare", "/compare?run=secret-run&run=secret-run",
        f"/compare/episodes?a={name}&b={name}", f"/e/{name}", f"/e/{name}/calls?first=1&last=2",
        f"/e/{name}/find?failed=1", f"/e/{name}/find?q=the-ans", f"/e/{name}/reply/1", f"/e/{name}/note/1",
        f"/e/{name}/tools", f"/e/{name}/prompt", f"/e/{name}/files", f"/e/{name}/files?show=0",
        f"/e/{name}/files/0", "/runs?name=secret-run&q=the-ans",
        f"/e/{name}/verdict.json", "/page/live", f"/e/{handle}", "/tasks/secret-task/mcp",
        f"/episodes/{handle}/mcp", "/page/assets/0/style.css", "/no/such/page",
    ]  # fmt: skip
    changes = [("/page/end", {"episode": name, "sure": "yes"})]
    changes += [("/page/run", {"run": "secret-run", "action": each, "sure": "yes"}) for each in ACTIONS]
    app = page_over(tmp_path, tokens=tokens, live=live)
    seen: dict[str, int] = {}
    for who in ("nobody", "agent id", "foreign host", "gamer", "other", "owner", "admin"):
        async with browser(app) as client:
            if who in ROLES:
                await sign_in(client, who)
            elif who == "agent id":
                await sign_in(client, f"agent-{handle}")
                client.headers["Authorization"] = f"Bearer agent-{handle}"
            elif who == "foreign host":
                await sign_in(client, "admin")
                client.headers["Host"] = "evil.example"
            responses = [await first_part(client, path) for path in paths]
            responses += [(await client.post(path, data=form)).text for path, form in changes]
        text = "".join(responses)
        assert handle not in text.replace(f"/e/{handle}", "").replace(f"/episodes/{handle}/mcp", "")
        assert f"agent-{handle}" not in text
        seen[who] = sum(text.count(secret) for secret in ("the-answer", "0.43", "0.4321"))
        if who not in ("owner", "admin"):
            assert "secret-run</a>" not in text
    assert {who for who, count in seen.items() if count} == {"owner", "admin"}


async def first_part(client: httpx2.AsyncClient, path: str) -> str:
    """A response, with its headers; of the events only that they are refused."""
    response = await client.get(path)
    return f"{response.headers}{response.text}"


async def test_an_episode_is_branched_at_a_call_and_played_on_by_hand(
    served: Served, person: httpx2.AsyncClient
) -> None:
    async with playing(served, "find-answer", "task") as player:
        await player.call("probe__write", path="answer.txt", text="42")
        source = public_id(player.episode_id)
        page = (await person.get(f"/e/{source}")).text
        assert f"decathlon-mcp replay {source} --state {served.state} --url {served.url}" in page
        assert 'action="/page/branch"' in page
        response = await person.post("/page/branch", data={"episode": source, "at": "1"})
        assert response.status_code == 303, response.text
        attempt = response.headers["location"].removeprefix("/play/")
        branch = next(each for each in served.episodes.live if each.public_id == attempt)
        await branch.state.reach(Phase.READY, Phase.ENDED)
        assert branch.calls.sent == 1
        assert (await person.get(f"/play/{attempt}")).status_code == 200
        assert "Call 1 was replayed from episode" in (await person.get(f"/e/{attempt}")).text
        for data, status in (
            ({"episode": source, "at": "7"}, 400),
            ({"episode": source, "at": "x"}, 400),
            ({"episode": "0" * 16, "at": "1"}, 404),
        ):
            assert (await person.post("/page/branch", data=data)).status_code == status
        branch.close()
