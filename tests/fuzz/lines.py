"""Generated lines for both readers of foreign bytes, some of them damaged.

python -m tests.fuzz.lines --minutes 30
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import driver_line, run_for_minutes, server_line

CORPUS = Path(__file__).parent / "corpus"
CHECKS: dict[str, Callable[[bytes], None]] = {
    "server_line": server_line.check,
    "driver_line": driver_line.check,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=10), values, max_size=4),
    max_leaves=10,
)
ID_VALUES: list[Any] = [1, 2, 3, 0, -1, 1.0, True, None, "1", [1], {}, 10**30]
IDS = st.sampled_from(ID_VALUES)
META = st.dictionaries(
    st.sampled_from(
        ["decathlon/error", "decathlon/verdict", "Decathlon/overlong", "decathlon/overlong", "own"]
    ),
    JSON,
)
RESULTS = JSON | st.fixed_dictionaries(
    {}, optional={"content": st.lists(JSON, max_size=3) | JSON, "_meta": META | JSON, "isError": JSON}
)
REPLIES = JSON | st.fixed_dictionaries(
    {}, optional={"jsonrpc": st.just("2.0"), "id": IDS, "result": RESULTS, "error": JSON}
)
ERRORS = JSON | st.fixed_dictionaries(
    {}, optional={"code": st.integers(-32800, 10) | JSON, "message": JSON, "data": JSON}
)
PARAMS = JSON | st.fixed_dictionaries(
    {},
    optional={
        "id": IDS,
        "params": RESULTS,
        "conn": st.sampled_from([-1, 1, 2, True, "1", None, 10**30]),
        "port": st.sampled_from([1000, 1, None, "1000"]),
        "data": st.sampled_from(["", "eA==", "!", "\u00e9"]) | JSON,
        "bytes": st.integers() | JSON,
        "progressToken": IDS,
        "protocolVersion": JSON,
        "tools": JSON,
        "nextCursor": JSON,
    },
)
NAMES = ["ready", "progress", "message", "changed", "opened", "data", "taken", "finished", "reset", "?"]
METHODS = (
    st.sampled_from(NAMES)
    | st.sampled_from([f"notifications/{name}" for name in ("progress", "message", "tools/list_changed")])
    | JSON
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | JSON,
        "id": IDS,
        "method": METHODS,
        "params": PARAMS,
        "result": REPLIES | RESULTS | PARAMS,
        "error": ERRORS,
        "overlong": JSON | st.fixed_dictionaries({"path": st.text(), "characters": st.integers()}),
    },
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Lines of messages, some of them damaged."""
    data = b"".join(
        json.dumps(message, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass") + b"\n"
        for message in draw(st.lists(MESSAGES, min_size=1, max_size=4))
    )
    if draw(st.booleans()):
        return data
    at, noise = draw(st.integers(0, len(data))), draw(st.binary(max_size=10))
    return data[:at] + noise + data[at + draw(st.integers(0, 5)) :]


def run(count: int) -> int:
    """Give this many generated streams to each reader; returns how many it were. Raises AssertionError."""
    executions = 0

    @settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(data=streams() | st.binary(max_size=200))
    def check(data: bytes) -> None:
        nonlocal executions
        executions += 1
        for reader in CHECKS.values():
            reader(data)

    check()
    return executions


if __name__ == "__main__":
    run_for_minutes(run)
