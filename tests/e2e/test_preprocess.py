"""Preprocess in a sandbox of its own: what the agent's sandbox has afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import yaml
from mcp.shared.exceptions import MCPError

from tests.probe.clients import Player, playing
from tests.probe.serving import SUITE, Served, serving

pytestmark = pytest.mark.anyio

FILES = """
import os, pathlib, subprocess, sys, urllib.request
workspace = pathlib.Path(sys.argv[sys.argv.index("--agent_workspace") + 1])
(workspace / "bin").mkdir()
(workspace / "bin/program").write_text("#!/bin/sh\\necho it runs")
(workspace / "bin/program").chmod(0o751)
(workspace / "bin/again").hardlink_to(workspace / "bin/program")
(workspace / "bin/relative").symlink_to("../bin/program")
(workspace / "absolute").symlink_to(workspace / "bin/program")
(workspace / "path").write_text(str(workspace / "bin/program"))
(workspace / "empty").mkdir(mode=0o700)
(workspace / "ümläut und leer").write_text("x")
os.utime(workspace / "path", (1_500_000_000, 1_500_000_000))
(workspace / "address").write_text("http://localhost:SHOP/")
answer = urllib.request.urlopen("http://localhost:SHOP/", timeout=30).read()
(workspace / "response").write_bytes(answer)
subprocess.run(["git", "init", "-q", "main"], cwd=workspace, check=True)
commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "first"]
subprocess.run(commit, cwd=workspace / "main", check=True)
subprocess.run(["git", "worktree", "add", "-q", workspace / "side"], cwd=workspace / "main", check=True)
pathlib.Path("utils/answer").write_text("42")
"""
FIFO = """
import os, sys
os.mkfifo(sys.argv[sys.argv.index("--agent_workspace") + 1] + "/pipe")
"""


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"from the service")

    def log_request(self, code: object = "-", size: object = "-") -> None: ...


@pytest.fixture(scope="module")
async def served(
    provider: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    """A server with two tasks: one whose preprocess uses a service, and one whose preprocess makes a FIFO."""
    suite = tmp_path_factory.mktemp("suites") / "suite"
    shutil.copytree(SUITE, suite)
    service = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=service.serve_forever, daemon=True).start()
    port = service.server_address[1] if provider == "host" else 10003
    for name, program in {"files": FILES.replace("SHOP", str(port)), "fifo": FIFO}.items():
        task = suite / "tasks" / "probe" / name
        shutil.copytree(suite / "tasks" / "probe" / "find-answer", task)
        (task / "preprocess").mkdir()
        (task / "preprocess" / "main.py").write_text(program)
    settings = yaml.safe_load((suite / "suite.yaml").read_text())
    settings["services"] = {"shop": {"ports": {port: service.server_address[1]}, "available": True}}
    settings["tasks"] |= {"files": {"services": ["shop"]}, "fifo": {"services": []}}
    (suite / "suite.yaml").write_text(json.dumps(settings))
    async with serving(tmp_path_factory.mktemp("state"), suite=(str(suite),), provider=provider) as served:
        yield served
    service.shutdown()
    service.server_close()


async def shell(player: Player, command: str) -> str:
    return (await player.text("probe__shell", command=command)).strip()


async def test_files_of_preprocess_are_the_same_in_the_agents_sandbox(served: Served) -> None:
    async with playing(served, "files", "task") as player:
        for program in ("bin/program", "bin/again", "bin/relative", "./absolute", '"$(cat path)"'):
            assert await shell(player, program) == "it runs", program
        assert await shell(player, "stat -c %a bin/program empty") == "751\n700"
        assert await shell(player, "stat -c %Y path") == "1500000000"
        assert await shell(player, "cat 'ümläut und leer'") == "x"
        assert await shell(player, "git -C side log --format=%s") == "first"
        assert await shell(player, "cat ../utils/answer ../../utils/answer 2>/dev/null | wc -c") == "0"


async def test_both_sandboxes_reach_the_services(served: Served) -> None:
    async with playing(served, "files", "task") as player:
        assert await shell(player, "cat response") == "from the service"
        get = "import urllib.request; print(urllib.request.urlopen(open('address').read()).read().decode())"
        assert await shell(player, f'python3 -c "{get}"') == "from the service"


async def test_files_that_cannot_be_copied_fail_the_set_up(served: Served) -> None:
    with pytest.raises((MCPError, ExceptionGroup)) as failed:
        async with playing(served, "fifo", "task") as player:
            await shell(player, "true")
    assert "cannot be copied to the agent's sandbox" in repr(failed.value)
