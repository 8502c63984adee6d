"""The endpoint of `run --model`: what it sends is bounded before it is kept."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Mapping

import pytest

from decathlon_mcp.plugins.agents.player import MAX_ANSWER_BYTES, ModelFailedError, model_endpoint
from tests.agents.models import Answer, posting


@pytest.mark.anyio
async def test_compressed_answer_is_refused_before_it_is_unpacked() -> None:
    asked: list[str] = []
    bomb = zlib.compress(bytes(64 << 20), 9)

    def answer(path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        asked.append(headers["accept-encoding"])
        return 200, {"Content-Encoding": "deflate"}, bomb

    with posting(answer) as url:
        async with model_endpoint(f"{url}/v1") as endpoint:
            tracemalloc.start()
            with pytest.raises(ModelFailedError, match="compresses its answers"):
                await endpoint.complete({"messages": []})
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert peak_bytes < MAX_ANSWER_BYTES
    assert asked == ["identity"]
