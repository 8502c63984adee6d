"""Processes that try to survive the claim: all are killed before the workspace is captured."""

from __future__ import annotations

from typing import Any

import pytest

from decathlon_mcp.plugins.audit.attacks import named
from tests.cheats.agent import CheatServer
from tests.probe.leftovers import processes_in_group

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

TOOLS_STOPPED = """
import os, signal, time
server = os.getppid()
if os.fork() == 0:
    os.setsid()
    time.sleep(0.5)  # until the reply to this call is sent
    os.kill(server, signal.SIGSTOP)
    while os.path.exists(f"/proc/{server}"):
        time.sleep(0.01)
    # Longer than the freeze takes: a survivor writes during grading.
    time.sleep(6)
    while True:
        open("/episode/workspace/report.json", "w").write('{"total": 70}')
"""


@pytest.mark.parametrize("name", [*named("survivor"), "tools-stopped"])
async def test_no_process_survives_the_claim(
    cheats: CheatServer, provider: str, docker_engine: Any, name: str
) -> None:
    async with cheats.unrewarded_episode() as agent:
        if (attack := named(name).get(name)) is not None:
            await agent.attack(attack, "sum-prices", outputs=["report.json"], content='{"total": 70}')
        else:
            await agent.python(TOOLS_STOPPED)
        await agent.claim()
        await agent.verdict()
        name = f"{agent.public_id}-agent"
        if provider == "docker":
            label = {"label": f"decathlon.sandbox={name}"}
            assert docker_engine.containers(all=True, filters=label) == []
        else:
            assert not processes_in_group(f"-{name}")
