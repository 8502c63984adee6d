"""A server that dies while its disk is full comes back when there is space, and its attempts go on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import httpx2
import pytest
from decathlon_client import Decathlon

from tests.disks import failing_disk, fill_blocks
from tests.driver.peer import until
from tests.survival.servers import supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.long]

DISK_MIB = 1500
"""Local sandboxes want a GiB."""
STARTS = 9
"""More than follow one another where no sandbox waits; they take over a minute."""


def use_all_inodes(filler: Path) -> None:
    filler.mkdir()
    with suppress(OSError):
        for number in count():
            (filler / str(number)).touch()


def remove(filler: Path) -> None:
    if filler.is_dir():
        shutil.rmtree(filler)
    else:
        filler.unlink()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fill", [fill_blocks, use_all_inodes], ids=["blocks", "inodes"])
async def test_server_that_dies_while_its_disk_is_full_comes_back(
    tmp_path: Path, fill: Callable[[Path], None]
) -> None:
    disk, filler = tmp_path / "disk", tmp_path / "disk" / "filler"
    disk.mkdir()
    log = disk / "state.log"
    with failing_disk(disk, DISK_MIB):
        log.symlink_to(tmp_path / "log")  # which can be written
        async with (
            supervised_server(disk / "state", "--min-free-mib", "0") as server,
            Decathlon(server.url) as client,
            client.episode("find-answer") as episode,
        ):
            await episode.call("probe__write", {"path": "answer.txt", "text": "42"})
            fill(filler)
            async with httpx2.AsyncClient() as http:
                response = await http.get(f"{server.url}/readyz")
            assert response.status_code == 503
            assert "No space left on device" in response.json()["why"]
            server.kill_at_once()
            # Its supervisor waits longer before each start.
            await until(lambda: log.read_text().count("started again") >= STARTS, seconds=200)
            remove(filler)
            assert (await episode.call("probe__read", {"path": "answer.txt"})).text == "42"
            assert (await episode.evaluate()).reward == 1.0
