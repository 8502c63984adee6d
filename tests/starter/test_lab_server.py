"""The server `lab`: long runs with progress that can be cancelled."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from tests.starter.bench import Server, serving

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Server]:
    async with serving("lab", tmp_path_factory.mktemp("lab")) as server:
        yield server


async def test_a_run_reports_ten_steps_and_then_writes_its_course(lab: Server) -> None:
    heard: list[tuple[float, float | None, str | None, bool]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, total, message, (lab.workspace / "runs" / "first.csv").exists()))

    reply = await lab.client.call_tool(
        "run_simulation", {"name": "first", "temperature": 60, "catalyst": 4}, progress_callback=hear
    )
    assert not reply.is_error
    assert [progress for progress, *_ in heard] == list(range(1, 11))
    assert {total for _, total, *_ in heard} == {10}
    assert heard[0][2] == "minute 6 of 60"
    assert not any(written for *_, written in heard[:9])
    lines = (lab.workspace / "runs" / "first.csv").read_text().splitlines()
    assert len(lines) == 61
    assert lines[56].startswith("56,")
    assert ",72.03," in lines[56]


async def test_a_cancelled_run_leaves_no_file_and_the_next_run_works(lab: Server) -> None:
    under_way = anyio.Event()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        under_way.set()

    async def run() -> None:
        await lab.client.call_tool(
            "run_simulation", {"name": "off", "temperature": 60, "catalyst": 4}, progress_callback=hear
        )

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await under_way.wait()
            tasks.cancel_scope.cancel()
        await lab.call_ok("run_simulation", name="next", temperature=60, catalyst=4)
    assert (lab.workspace / "runs" / "next.csv").exists()
    assert not (lab.workspace / "runs" / "off.csv").exists()


async def test_settings_that_the_reactor_does_not_have_and_names_that_are_taken_are_refused(
    lab: Server,
) -> None:
    right: dict[str, object] = {"name": "free", "temperature": 60, "catalyst": 4}
    for field, value in (("name", "../../out"), ("temperature", 300), ("catalyst", 4.2)):
        assert field in await lab.call_error("run_simulation", **{**right, field: value})
    (lab.workspace / "runs").mkdir(exist_ok=True)
    (lab.workspace / "runs" / "taken.csv").touch()
    assert "already" in await lab.call_error("run_simulation", **{**right, "name": "taken"})
    assert "50 to 95" in await lab.call_ok("describe_reactor")


async def test_the_meter_of_instruments_always_fails(tmp_path: Path) -> None:
    async with serving("instruments", tmp_path) as instruments:
        assert "E41" in await instruments.call_error("measure_moisture", sample="K1")
        assert await instruments.call_ok("weigh", sample="nothing") == "0.14 g"
        assert "there are K1 to K4" in await instruments.call_error("weigh", sample="K5")
