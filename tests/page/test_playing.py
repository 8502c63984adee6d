"""A task played in a browser without JavaScript: forms, redirects, and who may play what."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from html import unescape

import anyio
import httpx2
import pytest

from decathlon_mcp.plugins.page import play_pages
from tests.page.sites import HTML, OWN, sign_in
from tests.probe.serving import Served, module_server

pytestmark = pytest.mark.anyio


served = module_server(provider="host", page=True)


@pytest.fixture
async def person(served: Served) -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(
        base_url=served.url, headers={**HTML, **OWN}, timeout=60, follow_redirects=True
    ) as client:
        await sign_in(client, (served.state / "page-key").read_text().strip())
        yield client


def hidden(page: httpx2.Response, form: str) -> dict[str, str]:
    """The hidden inputs of the form with this action."""
    (body,) = re.findall(rf'<form[^>]* action="{re.escape(form)}"[^>]*>(.*?)</form>', page.text, re.DOTALL)
    found = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', body)
    return {name: unescape(value) for name, value in found}


async def start(person: httpx2.AsyncClient, task: str) -> httpx2.Response:
    """The page of a new attempt, once its tools can be called."""
    chosen = await person.get("/play", params={"task": task})
    page = await person.post("/play/start", data=hidden(chosen, "/play/start"))
    with anyio.fail_after(60):
        while 'data-phase="ready"' not in page.text:
            assert 'http-equiv="refresh"' in page.text
            page = await person.get(page.url.path)
    return page


async def call(person: httpx2.AsyncClient, path: str, tool: str, **inputs: str) -> httpx2.Response:
    page = await person.get(path, params={"tool": tool})
    form = hidden(page, f"{path}/form")
    return await person.post(f"{path}/form", data={**form, **inputs})


async def test_a_task_is_played_to_its_verdict(served: Served, person: httpx2.AsyncClient) -> None:
    page = await start(person, "say-answer")
    path = page.url.path
    (episode,) = [each for each in served.episodes.live if path.endswith(each.public_id)]
    assert episode.spec.labels == {"run": "by-hand"}
    page = await call(person, path, "probe__echo", **{"f.0": "hello <b>you</b>"})
    assert "hello &lt;b&gt;you" in page.text
    assert episode.calls.sent == 1
    for secret in (episode.id, episode.spec.agent_id):
        assert secret not in page.text
    page = await person.post(f"{path}/claim", data={**hidden(page, f"{path}/claim"), "answer": "42"})
    with anyio.fail_after(60):
        while 'data-phase="over"' not in page.text:
            page = await person.get(path)
    assert "Verdict" in page.text
    assert episode.verdict is not None
    assert ("The task is solved." in page.text) is episode.verdict.success


async def test_the_same_form_calls_once(served: Served, person: httpx2.AsyncClient) -> None:
    page = await start(person, "say-answer")
    path = page.url.path
    form = hidden(await person.get(path, params={"tool": "probe__echo"}), f"{path}/form")
    (episode,) = [each for each in served.episodes.live if path.endswith(each.public_id)]
    for _ in range(2):
        await person.post(f"{path}/form", data={**form, "f.0": "one"})
    assert episode.calls.sent == 1
    await person.post(f"{path}/form", data={**form, "f.0": "two"})
    assert episode.calls.sent == 2
    await person.post(f"{path}/end", data={"sure": "yes"})
    assert 'data-phase="over"' in (await person.get(path)).text


async def test_arguments_over_several_lines_are_one_line_of_the_trajectory(
    served: Served, person: httpx2.AsyncClient
) -> None:
    path = (await start(person, "say-answer")).url.path
    await call(person, path, "probe__echo", json='{\r\n  "text": "typed"\r\n}')
    (episode,) = [each for each in served.episodes.live if path.endswith(each.public_id)]
    (line,) = [each for each in episode.trajectory.file.read_text().splitlines() if '"event":"call"' in each]
    assert json.loads(line)["arguments"] == {"text": "typed"}
    await person.post(f"{path}/end", data={"sure": "yes"})


async def test_long_arguments_of_calls_that_run_are_bounded(
    served: Served, person: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play_pages, "MAX_RUNNING_BYTES", 10)
    path = (await start(person, "say-answer")).url.path
    await call(person, path, "probe__sleep", json='{"seconds": 60}')
    page = await call(person, path, "probe__echo", json='{"text": "one too many"}')
    assert "calls with long arguments run" in page.text
    (episode,) = [each for each in served.episodes.live if path.endswith(each.public_id)]
    assert episode.calls.last == 1
    await person.post(f"{path}/cancel", data={"call": "1", "tool": "probe__sleep"})
    await call(person, path, "probe__echo", json='{"text": "one"}')
    assert episode.calls.last == 2
    await person.post(f"{path}/end", data={"sure": "yes"})


async def test_a_violation_is_shown_at_its_field_and_nothing_is_called(
    served: Served, person: httpx2.AsyncClient
) -> None:
    page = await start(person, "say-answer")
    path = page.url.path
    page = await call(person, path, "probe__sleep", **{"f.0": "long"})
    assert 'aria-invalid="true"' in page.text
    assert "not a number" in page.text
    page = await call(person, path, "probe__echo", do="json", **{"f.0": "typed"})
    assert '"text": "typed"' in unescape(page.text)
    page = await call(person, path, "probe__echo", json="[1]")
    assert "must be a JSON object" in page.text
    page = await call(person, path, "probe__echo", json='{"text": "raw"}')
    (episode,) = [each for each in served.episodes.live if path.endswith(each.public_id)]
    assert episode.calls.sent == 1
    await person.post(f"{path}/end", data={"sure": "yes"})
