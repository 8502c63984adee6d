"""The link over a wire that breaks in every way, with the driver's own end at the other side."""

from __future__ import annotations

import anyio
import pytest

from decathlon_mcp.driver import stream as stream_module
from tests.driver_client.link_model import SERVERS, run_model

pytestmark = pytest.mark.anyio
BOUND_SECONDS = 300.0
"""For a busy machine; a thousand calls take half a second of processor time."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attach and open streams again without pauses."""
    monkeypatch.setattr(stream_module, "ATTACH_SECONDS", 0.0)
    monkeypatch.setattr(stream_module, "ANSWER_SECONDS", (0.02, 0.05))
    monkeypatch.setattr(stream_module, "REOPEN_SECONDS", (0.0, 0.0))
    for name in ("READ_BYTES_PER_SECOND", "READ_BYTES_BURST"):
        monkeypatch.setattr(stream_module, name, 1 << 40)


@pytest.mark.parametrize(
    ("seed", "calls"),
    [
        (1, 500),
        # Answers to `attach` that come while the next one waits for its turn.
        pytest.param(303, 4_500, marks=pytest.mark.slow),
    ],
    ids=["few", "late answers"],
)
async def test_each_call_runs_once_and_has_its_reply(seed: int, calls: int) -> None:
    with anyio.fail_after(BOUND_SECONDS):
        counts = await run_model(seed, calls)
    assert counts.twice == []
    assert counts.wrong == []
    assert counts.servers == SERVERS
    assert counts.calls >= calls - SERVERS
    assert counts.cuts > calls / 100
    assert counts.lost_pieces > counts.cuts
    assert counts.cancelled > 0
