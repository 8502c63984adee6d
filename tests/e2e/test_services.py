"""Services of a task: one on the host's loopback interface, and one in its own sandbox."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import pytest
import yaml
from mcp.shared.exceptions import MCPError

from tests.probe.clients import Player, connected, playing, start
from tests.probe.serving import SUITE, Served, serving

pytestmark = pytest.mark.anyio

GET = """
import sys, urllib.request
print(urllib.request.urlopen(f"http://localhost:{sys.argv[1]}/{sys.argv[2]}", timeout=30).read().decode())
"""
PREPROCESS = """
import os, pathlib, subprocess, sys
workspace = pathlib.Path(sys.argv[sys.argv.index("--agent_workspace") + 1])
(workspace / "get.py").write_text({get!r})
command = [sys.executable, workspace / "get.py", {port!r}, "order/pear"]
result = subprocess.run(command, text=True, capture_output=True)
(workspace / "response").write_text(result.stdout + result.stderr)
key = pathlib.Path("configs/shop.key")
(workspace / "key").write_text(key.read_text() if key.exists() else "none")
subprocess.Popen("nohup sh -c 'while :; do date +%s%N >beat; sleep 0.1; done' >/dev/null 2>&1 &",
                 shell=True, cwd=workspace)
"""
EVALUATION = """
import sys, urllib.request
orders = urllib.request.urlopen("http://localhost:{port}/orders", timeout=30).read().decode()
print(orders)
sys.exit(0 if "apple" in orders else 1)
"""
COUNTER = """
import http.server, os, sys
hits = [open("greeting").read()]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        hits.append(self.path.rpartition("/")[2])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(" ".join(hits).encode())
    def log_message(self, *arguments): pass
server = http.server.HTTPServer(("127.0.0.1", 7000), Handler)
if os.fork() == 0:
    server.serve_forever()
"""


class Shop(BaseHTTPRequestHandler):
    """`/order/THING` adds an order; every path returns the list of all orders."""

    orders: list[str]

    def do_GET(self) -> None:
        if self.path.startswith("/order/"):
            self.orders.append(self.path.rpartition("/")[2])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(" ".join(self.orders).encode())

    def log_request(self, code: Any = "-", size: Any = "-") -> None: ...


@pytest.fixture(scope="module")
def shop() -> Iterator[int]:
    """Port of a shop on this machine's loopback interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("ModuleShop", (Shop,), {"orders": []}))
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def add_task(suite: Path, name: str, files: dict[str, str]) -> None:
    folder = suite / "tasks" / "probe" / name
    shutil.copytree(suite / "tasks" / "probe" / "find-answer", folder)
    for file, text in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)


@pytest.fixture(scope="module")
async def served(
    provider: str, shop: int, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    """A server with tasks that use the shop, a service that is down, and a service in its own sandbox."""
    suite = tmp_path_factory.mktemp("suites") / "suite"
    shutil.copytree(SUITE, suite)
    port = shop if provider == "host" else 10003
    preprocess = PREPROCESS.format(get=GET, port=str(port))
    add_task(
        suite,
        "shopping",
        {"preprocess/main.py": preprocess, "evaluation/main.py": EVALUATION.format(port=port)},
    )
    add_task(suite, "counting", {"evaluation/main.py": EVALUATION.format(port=7000)})
    (suite / "keys").mkdir()
    (suite / "keys" / "one").write_text("first key")
    settings = yaml.safe_load((suite / "suite.yaml").read_text())
    settings["services"] = {
        "shop": {"ports": {port: shop}, "available": True},
        "counter": {
            "ports": {7000: 1},
            "private": {
                "ports": [7000],
                # Where there is an engine, the image is found.
                "available": provider == "host",
                "image": "decathlon-test:latest",
                "start": ["python3", "-c", COUNTER],
                "files": {"greeting": "keys/one"},
            },
        },
    }
    settings["accounts"] = {
        "shop": {"tasks": ["shopping"], "slots": {"one": {"files": {"configs/shop.key": "keys/one"}}}}
    }
    settings["tasks"] |= {
        "shopping": {"services": ["shop"], "leaves_running": True},
        "counting": {"services": ["counter"]},
    }
    (suite / "suite.yaml").write_text(json.dumps(settings))
    async with serving(tmp_path_factory.mktemp("state"), suite=(str(suite),), provider=provider) as served:
        yield served


async def get(player: Player, port: int, path: str) -> str:
    command = f"python3 -c '{GET}' {port} {path}"
    return (await player.text("probe__shell", command=command)).strip()


async def test_a_sandbox_without_a_network_reaches_a_service_on_the_hosts_loopback_interface(
    served: Served, provider: str, shop: int
) -> None:
    port = shop if provider == "host" else 10003
    async with playing(served, "shopping", "task") as player:
        assert "pear" in await player.text("probe__read", path="response"), "preprocess can reach it"
        assert "apple" in await get(player, port, "order/apple")
        await player.call("claim_done")
        verdict = (await player.call("evaluate")).structured_content
    assert (verdict["agent_network"], verdict["grader_network"]) == ("none", "none")
    assert (verdict["status"], verdict["reward"]) == ("scored", 1.0), "the evaluator can reach it"


async def test_no_other_port_of_the_host_can_be_reached(served: Served, provider: str, shop: int) -> None:
    if provider == "host":
        return
    async with playing(served, "shopping", "task") as player:
        for port in (shop, int(served.url.rpartition(":")[2]), 22):
            assert "Connection refused" in await get(player, port, "orders")


async def test_processes_that_preprocess_started_keep_running_and_credentials_are_in_place(
    served: Served,
) -> None:
    async with playing(served, "shopping", "task") as player:
        assert await player.text("probe__read", path="key") == "first key"
        before = await player.text("probe__read", path="beat")
        while await player.text("probe__read", path="beat") == before:  # noqa: ASYNC110
            await anyio.sleep(0.05)


@pytest.mark.docker
async def test_a_private_service_is_new_for_each_episode_and_outlives_the_agents_sandbox(
    served: Served, provider: str
) -> None:
    if provider == "host":
        started = await start(served, "counting", wait=False)
        async with connected(served.lobby) as lobby:
            with pytest.raises(MCPError, match="the service counter needs a container"):
                await lobby.call_tool("list_tools", {"episode": started["episode"]})
        return
    for _ in range(2):
        async with playing(served, "counting", "task") as player:
            assert await get(player, 7000, "order/apple") == "first key apple"
            await player.call("claim_done")
            verdict = (await player.call("evaluate")).structured_content
        assert (verdict["status"], verdict["reward"]) == ("scored", 1.0)
        assert verdict["evaluator_output"].strip() == "first key apple orders"
