"""An agent that uses the time in which no server runs. The server is a process of its own."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_client import Decathlon

from decathlon_mcp.sandboxes.host.namespaces import STATUS_FILE
from decathlon_mcp.sandboxes.host.plugin import FOLDER
from tests.cheats.agent import SOLUTIONS, SUITE
from tests.cheats.test_resources import KILLERS, RAISE_OOM_SCORES
from tests.probe.leftovers import processes_marked
from tests.survival.servers import SupervisedServer, supervised_server


async def until_it_has_ended(provider: str, engine: Any, state: Path, name: str) -> None:
    def is_running() -> bool:
        if provider == "docker":
            return engine.inspect_container(f"decathlon-{name}")["State"]["Running"]
        return "exit-code" not in (state / FOLDER / name / STATUS_FILE).read_text()

    while is_running():  # noqa: ASYNC110  (the test's own deadline ends it)
        await anyio.sleep(0.1)


pytestmark = [pytest.mark.anyio, pytest.mark.docker]


async def test_killing_the_driver_while_no_server_runs_forfeits_the_attempt(
    tmp_path: Path, provider: str, image: str | None, docker_engine: Any
) -> None:
    """The next server finds out why the sandbox has ended. A reward of 0, even for the right answer."""
    if image is None:
        pytest.skip("only a program as root can choose that the driver is killed, and here is none")
    state = tmp_path / "state"
    kernel = ("--kernel", "gvisor") if provider == "gvisor" else ()
    options = ("--no-supervisor", "--image", image, "--memory-mib", "256", *kernel)
    name = "docker" if provider == "docker" else "host"

    def serve(port: int = 0) -> AbstractAsyncContextManager[SupervisedServer]:
        return supervised_server(state, *options, provider=name, suite=SUITE, port=port)

    async with AsyncExitStack() as servers:
        server = await servers.enter_async_context(serve())
        async with Decathlon(server.url) as client, client.episode("sum-prices") as episode:
            await episode.call("root__shell", {"command": SOLUTIONS["sum-prices"]})
            await episode.call("root__shell", {"command": RAISE_OOM_SCORES})
            write = f"cat > /tmp/bomb.py <<'END'\nimport time\ntime.sleep(2)\n{KILLERS[provider]}\nEND\n"
            command = f"{write}setsid python3 /tmp/bomb.py > /dev/null 2>&1 &"
            await episode.call("root__shell", {"command": command})
            server.process.kill()
            await server.process.wait()
            await until_it_has_ended(provider, docker_engine, state, f"{episode.public_id}-agent")
            await servers.enter_async_context(serve(server.port))
            verdict = await episode.evaluate()
            assert verdict.status == "forfeited"
            assert verdict.reward == 0.0
            assert "out of memory" in verdict.raw["detail"]
    assert processes_marked(state) == []
