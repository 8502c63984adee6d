"""What an episode reports, in every way that its calls and the episode itself can end."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.plugins.metrics import metrics_of
from tests.episodes.calling import make_call
from tests.episodes.environment import TOOLS, running_registry
from tests.fakes.provider import FakeProvider

pytestmark = pytest.mark.anyio

CLIENT = Principal()


def value(registry: EpisodeRegistry, name: str, **labels: str) -> float:
    """The value of one series."""
    found = metrics_of(registry).registry.get_sample_value(f"decathlon_{name}", labels)
    assert found is not None, f"there is no series {name} {labels}"
    return found


async def test_a_call_without_a_reply_is_counted_as_lost_or_cancelled(tmp_path: Path) -> None:
    async with running_registry(tmp_path, FakeProvider(tools=TOOLS)) as registry:
        episode = registry.start("find-answer", CLIENT)
        await episode.ready()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(make_call, episode, "probe__hang", CallParams())
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        with pytest.raises(DecathlonError):
            await make_call(episode, "probe__die", CallParams.of({}))
        verdict = await episode.evaluate()
        for outcome, count in (("ok", 0), ("error", 0), ("lost", 1), ("cancelled", 1)):
            assert value(registry, "tool_calls_total", outcome=outcome) == count
        assert value(registry, "tool_call_seconds_count", hop="driver") == 2
        assert value(registry, "tool_call_seconds_count", hop="request") == 0
        assert value(registry, "evaluations_total", suite="probe", status=verdict.status) == 1
