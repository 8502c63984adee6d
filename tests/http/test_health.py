"""`/healthz`, `/readyz` and `/metrics` of a server that is used."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx2
import pytest
from mcp.shared.exceptions import MCPError
from prometheus_client.parser import text_string_to_metric_families as parse_text

from decathlon_mcp.app import create_registry
from decathlon_mcp.background import background_tasks
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.listening import listen
from decathlon_mcp.http.server import serve_http
from decathlon_mcp.settings import read_settings
from tests.episodes.environment import sandbox_factory
from tests.episodes.test_disk import DISK_MIB, FLOOR_MIB, disk, fill
from tests.fakes.provider import FakeProvider
from tests.http.messages import INITIALIZE, tokens_of
from tests.probe.clients import connected, playing, refused
from tests.probe.serving import serving

pytestmark = pytest.mark.anyio

__all__ = ["disk"]  # a fixture


class Scraped(dict[str, float]):
    """The samples of one scrape, by their text such as `name{label="value"}`, without the `decathlon_`."""

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series of that name with these labels."""
        required = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(
            value
            for text, value in self.items()
            if text.partition("{")[0] == name and required <= labels_of(text)
        )


def labels_of(series: str) -> set[str]:
    return set(re.findall(r'\w+="[^"]*"', series))


async def scrape(http: httpx2.AsyncClient, url: str, **headers: str) -> Scraped:
    response = await http.get(f"{url}/metrics", headers={"Accept": "text/plain", **headers})
    assert response.status_code == 200
    scraped = Scraped()
    for family in parse_text(response.text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            series = f"{sample.name.removeprefix('decathlon_')}{{{labels}}}"
            assert series not in scraped, "a series appears twice"
            scraped[series] = sample.value
    return scraped


async def ready(http: httpx2.AsyncClient, url: str) -> tuple[int, str]:
    """Status and state of `/readyz`; `/healthz` must be 200 and name the same state."""
    response = await http.get(f"{url}/readyz")
    health = await http.get(f"{url}/healthz")
    assert health.status_code == 200
    assert health.json()["state"] == response.json()["status"]
    return response.status_code, response.json()["status"]


async def test_an_episode_changes_the_metrics(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    async with serving(tmp_path / "state", provider="host") as served:
        before = await scrape(http, served.url)
        assert before.total("tool_calls_total") == before.total("episodes_started_total") == 0
        assert before.total("state", state="ready") == before.total("state") == 1
        async with playing(served, "say-answer", "task") as player:
            await player.text("probe__echo", text="hello")
            await player.call("probe__fail")
            during = await scrape(http, served.url)
            assert during.total("episodes") == during.total("episodes", suite="probe", phase="ready") == 1
            assert during.total("sandboxes") == 1
            await player.call("probe__write", path="answer.txt", text="x")
            await player.call("claim_done", answer="42")
            await player.call("evaluate")
        episode = served.episodes.find(player.episode_id, served.find(player.episode_id).spec.owner)
        await episode.state.reach(Phase.ENDED)
        assert episode.verdict is not None
        after = await scrape(http, served.url)
    assert after.total("tool_calls_total", outcome="ok") == 2
    assert after.total("tool_calls_total", outcome="error") == 1
    for hop in ("request", "driver", "response"):
        assert after.total("tool_call_seconds_count", hop=hop) == 3
        assert 0 < after.total("tool_call_seconds_sum", hop=hop) < 60
        assert after.total("tool_call_seconds_bucket", hop=hop, le="+Inf") == 3
    for name in ("queue", "opening", "evaluation"):
        assert after.total(f"{name}_seconds_count") == 1
    assert after.total("evaluations_total") == 1
    assert after.total("evaluations_total", suite="probe", status=episode.verdict.status) == 1
    assert after.total("episodes_ended_total") == after.total("episodes_started_total") == 1
    assert episode.state.ending is Ending.SCORED
    assert after.total("episodes_ended_total", ending="scored") == 1
    assert after.total("episodes") == after.total("sandboxes") == 0
    assert after.total("http_request_bytes_total") > before.total("http_request_bytes_total")
    assert after.total("http_response_bytes_total") > len(str(before))
    assert after.total("http_connections") >= 1
    assert after.total("process_resident_memory_bytes") > 1 << 20
    assert after.total("process_open_fds") > 3


async def test_names_that_clients_make_up_are_no_labels(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    async with serving(tmp_path / "state", provider="host", metrics_tasks=True) as served:

        async def series() -> set[str]:
            scraped = await scrape(http, served.url)
            return {name for name in scraped if not name.startswith("http_responses_total")}

        async with playing(served, "find-answer", "task") as player:
            await player.text("probe__echo", text="hello")
            before = await series()
            for number in range(3):
                name = f"made-up-{number}"
                for url in (served.task(name), served.episode(name)):
                    assert "error" in (await http.post(url, json=INITIALIZE)).json()
                assert (await http.get(f"{served.url}/{name}")).status_code == 404
                with pytest.raises(MCPError, match=name):
                    await player.call(f"probe__{name}")
                async with connected(served.lobby) as lobby:
                    assert name in await refused(lobby, "start_episode", task=name)
            after = await series()
        assert after == before
        assert not any("made-up" in name for name in after)
        labelled = {name for name in after if 'task="find-answer"' in name}
        assert {name.partition("{")[0] for name in labelled} == {"episodes", "episodes_started_total"}


async def test_metrics_need_a_controllers_token_and_a_known_host(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    tokens = tokens_of(tmp_path, ada="player", carl="controller", root="admin")
    async with serving(tmp_path / "state", provider="host", tokens=tokens) as served:
        url = f"{served.url}/metrics"
        assert (await http.get(url)).status_code == 401
        for name, status in (("eve", 401), ("ada", 403), ("carl", 200), ("root", 200)):
            response = await http.get(url, headers={"Authorization": f"Bearer {name}"})
            assert response.status_code == status
        token = {"Authorization": "Bearer root"}
        assert (await http.get(url, headers={**token, "Host": "evil.example"})).status_code == 421
        assert (await http.get(url, headers={**token, "Origin": "http://evil.example"})).status_code == 403
        assert await ready(http, served.url) == (200, "ready")


async def test_a_full_server_is_not_ready(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    async with serving(tmp_path / "state", provider="host", max_sandboxes=1, max_queue=1) as served:
        assert await ready(http, served.url) == (200, "ready")
        async with playing(served, "find-answer", "task") as player:
            await player.text("probe__echo", text="hello")
            assert await ready(http, served.url) == (200, "ready")  # there is a place in the queue
            queued = await http.post(served.task("find-answer"), json=INITIALIZE)
            assert queued.status_code == 200
            assert await ready(http, served.url) == (503, "full")
            response = await http.get(f"{served.url}/readyz")
            assert 5 <= int(response.headers["retry-after"]) <= 15
            assert response.json()["waiting"] == 1
            refusal = await http.post(served.task("find-answer"), json=INITIALIZE)
            assert refusal.json()["error"]["data"]["code"] == "at_capacity"
            assert 5 <= int(refusal.headers["retry-after"]) <= 15
            scraped = await scrape(http, served.url)
            assert scraped.total("queue_length") == scraped.total("state", state="full") == 1
            assert scraped.total("http_responses_total", status="503") == 2
        session = {"Mcp-Session-Id": queued.headers["mcp-session-id"]}
        await http.delete(served.task("find-answer"), headers=session)
        assert await ready(http, served.url) == (200, "ready")


async def test_a_server_without_free_space_is_not_ready(disk: Path, http: httpx2.AsyncClient) -> None:
    assert FLOOR_MIB < DISK_MIB
    async with serving(disk / "state", provider="host", min_free_mib=FLOOR_MIB) as served:
        assert await ready(http, served.url) == (200, "ready")
        fill(disk)
        assert await ready(http, served.url) == (503, "disk_low")
        assert (await http.get(f"{served.url}/healthz")).json()["status"] == "disk_full"
        assert (await http.get(f"{served.url}/readyz")).headers["retry-after"] == "60"
        scraped = await scrape(http, served.url)
        assert scraped.total("disk_free_bytes") < scraped.total("disk_floor_bytes") == FLOOR_MIB << 20
        (disk / "filler").unlink()
        assert await ready(http, served.url) == (200, "ready")


async def test_a_draining_server_is_not_ready(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    async with serving(tmp_path / "state", provider="host", drain_seconds=60) as served:
        async with playing(served, "slow-verdict", "task") as player, background_tasks() as tasks:
            await player.call("claim_done")
            tasks.start_soon(served.episodes.shutdown.drain)
            while not served.episodes.shutdown.has_begun:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            assert await ready(http, served.url) == (503, "draining")
            assert (await http.get(f"{served.url}/healthz")).json()["status"] == "draining"
            refusal = await http.post(served.task("find-answer"), json=INITIALIZE)
            assert "shutting down" in refusal.json()["error"]["message"]


async def test_a_server_is_ready_once_it_has_started_and_recovered(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with registry_served(tmp_path) as (registry, url):
        assert await ready(http, url) == (503, "starting")
        assert (await http.get(f"{url}/readyz")).headers["retry-after"] == "2"
        async with registry.running():
            registry.recovering = True
            assert await ready(http, url) == (503, "recovering")
            registry.recovering = False
            assert await ready(http, url) == (200, "ready")
            (suite,) = registry.catalogue.suites
            provider = registry.factory(suite.name).provider
            assert isinstance(provider, FakeProvider)
            provider.unavailable = True
            assert await ready(http, url) == (503, "no_engine")
            provider.unavailable = False
            assert await ready(http, url) == (200, "ready")
        assert await ready(http, url) == (503, "draining")


@asynccontextmanager
async def registry_served(tmp_path: Path) -> AsyncGenerator[tuple[EpisodeRegistry, str]]:
    """A registry that is served but does not run yet, and the URL."""
    settings = read_settings({"state": tmp_path})
    factory = sandbox_factory(tmp_path, FakeProvider())
    suites = {factory.suite.name: factory}
    registry = create_registry(Catalogue([factory.suite]), suites, settings, tmp_path)
    listener = listen("127.0.0.1", 0)
    listening, stop = anyio.Event(), anyio.Event()

    async def no_drain() -> None:
        registry.shutdown.drained.set()

    async def serve() -> None:
        await serve_http(http_app(registry), listener, drain=no_drain, on_ready=listening.set, stop=stop)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        await listening.wait()
        yield registry, f"http://127.0.0.1:{listener.getsockname()[1]}"
        stop.set()
