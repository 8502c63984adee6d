"""`view`: the page over a state folder."""

from __future__ import annotations

import re
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path

import anyio
import httpx2
import pytest
from anyio.streams.text import TextReceiveStream

from tests.cli.conftest import COMMAND, Shell
from tests.history.stored_episodes import Folder
from tests.page.sites import HTML, OWN, sign_in

pytestmark = pytest.mark.anyio


async def test_view_shows_several_folders_as_one_without_a_server(shell: Shell) -> None:
    states = [shell.folder / "first", shell.folder / "second"]
    for state, run in zip(states, ("alpha", "beta"), strict=True):
        state.mkdir()
        with Folder(state) as folder:
            folder.add("1" * 48 if run == "alpha" else "2" * 48, labels={"run": run})
    command = [*COMMAND, "view", *map(str, states), "--port", "0"]
    async with await anyio.open_process(
        command, env=shell.environment, cwd=shell.folder, stderr=None
    ) as process:
        assert process.stdout is not None
        line = (await TextReceiveStream(process.stdout).receive()).strip()
        # Stdout is no terminal here, and may be a log.
        pattern = r"(http://decathlon\.localhost:(\d+)/) \(`(.*)` prints the address with its key\)"
        shown = re.fullmatch(pattern, line)
        assert shown is not None
        address, port, key_command = shown.groups()
        key = (states[0] / "page-key").read_text().strip()
        assert key not in line
        printed = shell.run(*shlex.split(key_command)[1:]).stdout
        assert printed == f"http://decathlon.localhost:{port}/#key={key}\n"
        url = address.replace("decathlon.localhost", "127.0.0.1")
        async with httpx2.AsyncClient(base_url=url, headers={**HTML, **OWN}) as client:
            await sign_in(client, key)
            runs = (await client.get("/runs")).text
            assert "/runs/alpha" in runs
            assert "/runs/beta" in runs
            assert (
                await client.post("/page/run", data={"run": "alpha", "action": "delete"})
            ).status_code == 403
        process.terminate()
        assert await process.wait() == 0


def test_the_address_of_a_servers_page_has_its_key(shell: Shell, tmp_path: Path) -> None:
    done = shell.run("view", str(tmp_path), "--address", "--port", "9999")
    key = (tmp_path / "page-key").read_text().strip()
    assert done.stdout == f"http://decathlon.localhost:9999/#key={key}\n"


def test_a_folder_of_another_version_is_refused_before_the_page_is_served(
    shell: Shell, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        connection.execute("PRAGMA user_version = 4")
    done = shell.run("view", str(tmp_path), "--port", "0")
    assert done.returncode == 2
    assert "has schema 4, and this version of decathlon-mcp needs" in done.stderr
    assert "no server has kept episodes in " in shell.error("view", status=1)
