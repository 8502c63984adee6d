"""The program of `docs/branching.md`, run as printed on sandboxes of gVisor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.pages import block
from tests.docs.snippets import run
from tests.probe.serving import serving

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.long]


async def test_search_finds_the_continuation_that_passes(
    tmp_path: Path, runsc: str, unpacked_image: str
) -> None:
    async with serving(
        tmp_path / "state",
        suite=("starter",),
        provider="host",
        kernel="gvisor",
        image=unpacked_image,
        isolation="auto",
    ) as served:
        program = block("docs/branching.md", "A search", "python")
        output = await run(program, [sys.executable], url=served.url, folder=tmp_path)
    lines = output.splitlines()
    assert [line.split(" {")[0] for line in lines] == [
        f"{degrees} °C: {float(degrees == 60)}" for degrees in range(57, 65)
    ]
    assert all("'at': 3, 'differences': 0, 'exact': True" in line for line in lines)
