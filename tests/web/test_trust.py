"""The program that makes a sandbox trust the proxy's authority, and the variables for its programs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any

import anyio
import pytest

from decathlon_mcp.driver.client import BOOT_COMMAND, connect
from decathlon_mcp.payloads import source
from decathlon_mcp.plugins.web.episodes import proxy_variables
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.host.provider import HostProvider
from tests.arxiv.authority import Authority
from tests.tunnels.test_tunnels import unique_owner

BUNDLE = "-----BEGIN CERTIFICATE-----\nown\n-----END CERTIFICATE-----\n"


def install(folder: Path, order: dict[str, Any]) -> dict[str, Any]:
    """Run the payload as a sandbox would, with an own bundle; returns what it wrote to the channel."""
    bundle = folder / "own.pem"
    bundle.write_text(BUNDLE)
    read, write = os.pipe()
    with os.fdopen(read) as channel:
        try:
            subprocess.run(
                [sys.executable, "-c", source("trust", "decathlon_mcp.plugins.web"), json.dumps(order)],
                env={**os.environ, "SSL_CERT_FILE": str(bundle), "DECATHLON_CHANNEL": str(write)},
                pass_fds=(write,),
                timeout=60,
                check=True,
            )
        finally:
            os.close(write)
        return json.loads(channel.read())


def test_the_authority_is_added_to_what_the_sandbox_trusts(tmp_path: Path) -> None:
    pem, target = Authority().pem, tmp_path / "root" / ".decathlon-web"
    order: dict[str, Any] = {
        "authority": pem,
        "folder": str(target),
        "search": [],
        "system": False,
        "resolver": True,
    }
    assert install(tmp_path, order) == {"bundles": 0, "nss": False, "resolver": False}
    assert (target / "authority.pem").read_text() == pem
    assert (target / "bundle.pem").read_text() == BUNDLE + pem


def test_bundles_of_python_environments_are_found(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "payload"}
    exec(compile(source("trust", "decathlon_mcp.plugins.web"), "web_trust", "exec"), namespace)
    bundles = [
        tmp_path / "venv/lib/python3.12/site-packages" / name
        for name in ("certifi/cacert.pem", "pip/_vendor/certifi/cacert.pem")
    ]
    other = tmp_path / "node_modules/lib/site-packages/certifi/cacert.pem"
    for path in (*bundles, other):
        path.parent.mkdir(parents=True)
        path.write_text(BUNDLE)
    assert sorted(namespace["package_bundles"]([str(tmp_path)])) == sorted(bundles)
    for _ in range(2):
        assert namespace["append"](bundles[0], "new\n")
    assert bundles[0].read_text() == BUNDLE + "new\n"
    assert not namespace["append"](tmp_path / "missing.pem", "new\n")


class Greeting(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"a service at the sandbox's own port")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_programs_reach_the_sandboxs_own_ports_without_the_proxy() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # does not listen: the proxy would refuse
        variables = proxy_variables(unused.getsockname()[1], "/nowhere")
        with HTTPServer(("127.0.0.1", 0), Greeting) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            addresses = [f"http://{host}:{server.server_port}/" for host in ("localhost", "127.0.0.1")]
            read = (
                f"import urllib.request\nfor each in {addresses}: print(urllib.request.urlopen(each).read())"
            )
            for names in (("http_proxy", "no_proxy"), ("HTTP_PROXY", "NO_PROXY")):
                environment = {name: variables[name] for name in names}
                done = subprocess.run(
                    [sys.executable, "-c", read], env=environment, capture_output=True, text=True, check=False
                )
                assert done.stdout.count("own port") == 2, done.stderr
            server.shutdown()


@pytest.mark.anyio
async def test_programs_get_the_variables_of_their_sandbox_unless_they_set_them(tmp_path: Path) -> None:
    variables = proxy_variables(8899, "/suite/.decathlon-web")
    spec = SandboxSpec("variables", BOOT_COMMAND, PurePosixPath("/episode"))
    show = ["python3", "-c", "import os; print(os.environ['HTTPS_PROXY'], os.environ['NO_PROXY'])"]
    with anyio.fail_after(60):
        async with (
            HostProvider(unique_owner(), tmp_path, isolation="none") as provider,
            provider.open(spec) as sandbox,
            connect(sandbox) as driver,
        ):
            driver.set_environment(variables)
            result = await driver.run(
                show, cwd=str(sandbox.root), timeout_seconds=30, env={"NO_PROXY": "own"}
            )
    assert result.stdout.split() == ["http://127.0.0.1:8899", "own"]
