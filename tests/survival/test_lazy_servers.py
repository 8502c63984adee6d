"""Servers of a task that have not started yet when `serve` is killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import anyio
import pytest
from decathlon_client import Decathlon

from tests.driver.peer import until
from tests.probe.serving import SUITE
from tests.survival.servers import supervised_server
from tests.survival.test_restart import assert_nothing_left

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SECRET = "not-for-the-disk-7c1f"
PAUSE_SECONDS = 1.0
SERVER = f"""
type: stdio
name: second
params:
  command: sh
  args:
    - "-c"
    - "echo started >> starts.txt; sleep {PAUSE_SECONDS}; exec python3 -S $0 $1"
    - "${{local_servers_paths}}/probe_server.py"
    - "${{agent_workspace}}"
  cwd: "${{agent_workspace}}"
  env: {{SECRET: "${{token.secret}}"}}
"""


def suite_with_a_secret(folder: Path) -> Path:
    """The probe suite; its task `find-answer` has a second server, which starts slowly and knows a secret."""
    suite = folder / "suite"
    shutil.copytree(SUITE, suite)
    (suite / "configs" / "mcp_servers" / "second.yaml").write_text(SERVER)
    (suite / "configs" / "token_key_session.py").write_text(
        f"all_token_key_session = {{'secret': '{SECRET}'}}\n"
    )
    config = suite / "tasks" / "probe" / "find-answer" / "task_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "needed_mcp_servers": ["probe", "second"]})
    )
    return suite


def files_with_the_secret(state: Path) -> list[str]:
    """The files of the state folder that contain it, except for the sandboxes and the suite's own files."""
    found: list[str] = []
    for path in state.rglob("*"):
        own = path.relative_to(state).parts[0] not in ("sandboxes", "scratch")
        if own and path.is_file() and SECRET.encode() in path.read_bytes():
            found.append(str(path))
    return found


async def test_next_server_starts_servers_by_name_and_has_no_secrets(tmp_path: Path) -> None:
    suite = suite_with_a_secret(tmp_path)
    # Without isolation, so that this process sees the sandbox's files.
    options = ("--isolation", "none")
    async with supervised_server(tmp_path / "state", *options, suite=str(suite)) as server:
        async with Decathlon(server.url) as client:
            async with client.episode("find-answer") as episode:
                await episode.call("probe__echo", {"text": "the lists are known now"})
            async with client.episode("find-answer") as episode:
                await episode.call("probe__echo", {"text": "ready"})
                await server.kill()
                # It starts while the server is killed again: the next one waits for the same start.
                replies: list[str] = []

                async def call() -> None:
                    command = "echo ${#SECRET}; cat starts.txt"
                    replies.append((await episode.call("second__shell", {"command": command})).text)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call)
                    workspace = episode_workspace(tmp_path / "state")
                    await until(lambda: (workspace / "starts.txt").exists())
                    await server.kill()
                assert replies == [f"{len(SECRET)}\nstarted\n"]
                assert (await episode.call("probe__echo", {"text": "still up"})).text == "still up"
                assert files_with_the_secret(tmp_path / "state") == []
    await assert_nothing_left(tmp_path / "state")


def episode_workspace(state: Path) -> Path:
    """The workspace of the only sandbox."""
    (workspace,) = (state / "sandboxes").glob("*/root/workspace")
    return workspace
