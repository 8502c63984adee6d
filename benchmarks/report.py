"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks.batch import Batch, Load
from benchmarks.calls import DIRECT, DIRECT_ENDPOINTS, SERVER_PATHS, STREAM, Calls, Processes
from benchmarks.metering import Metering
from benchmarks.openings import Openings
from benchmarks.samples import Samples
from benchmarks.servers import SINGLE, Servers

if TYPE_CHECKING:
    from benchmarks.attacks import Outcome

CALLS = """\
Calls take turns with their two legs: the same tool server called directly over the SDK's HTTP on loopback
(with JSON responses, the SDK's fastest format, and with events, its default), and the same call over a
container's attached stream (the tool server is the first process; raw lines on a blocking socket). Each path
has its own SDK client; all clients run in one process."""
METERING = "Counting a call over HTTP for `/metrics`, in the server's process, without any call."
PROCESSES = "A call through the server and a sandbox, compared with starting a process for each call."
OPENINGS = "Time from the client's `initialize` to the reply of `tools/list`, over HTTP, in a container."
SERVERS = """\
Time from `initialize` to the reply of `tools/list`, for tasks with one MCP server each and for one task with
all four, in turns. `excel`, `git` and `echo` use the MCP SDK and need CPU time for their imports: with fewer
cores than servers, four of them take at least their total CPU time divided by the number of cores. `plain`
uses only the standard library."""
BATCH = "All episodes are opened concurrently, called by minimal HTTP clients, claimed, graded and closed."


ATTACKS = """\
Each attack runs against a fresh server of the local provider with {limit:g} GiB of address space. The
neighbour is an episode that was open before; it is played and graded after the attack."""


def head(machine: dict[str, str]) -> str:
    return "# Benchmark results\n\n" + "\n".join(f"- {name}: {value}" for name, value in machine.items())


def calls(measured: Calls) -> str:
    samples = measured.samples
    rows = [
        *((f"{endpoint}, {era}", samples[endpoint, era]) for endpoint, era in SERVER_PATHS),
        *((f"leg: {endpoint}, {era}", samples[endpoint, era]) for endpoint, era in DIRECT),
        ("leg: attached stream", samples[STREAM]),
    ]
    times = table(("a call of 100 bytes", "p50 ms", "p99 ms"), (_times(name, of) for name, of in rows))
    ratios = table(
        ("through the server and a sandbox / the sum of its legs", "p50", "p99"),
        (
            _ratios(
                f"{endpoint}, {era} / {direct} + stream", samples[endpoint, era], measured.legs(direct, era)
            )
            for endpoint, era in SERVER_PATHS
            for direct in DIRECT_ENDPOINTS
        ),
    )
    return f"## Tool call\n\n{CALLS}\n\n{times}\n\n{ratios}"


def processes(measured: Processes) -> str:
    rows = [("a call", measured.call), ("`docker exec python3 -c 'import mcp'`", measured.process)]
    times = table(("in turns", "p50 ms", "p99 ms"), (_times(name, of) for name, of in rows))
    factor = measured.process.p50 / measured.call.p50
    summary = f"A call is **{factor:.0f} times** faster."
    return f"## Tool call and process per call\n\n{PROCESSES}\n\n{times}\n\n{summary}"


def metering(measured: Metering) -> str:
    cost = f"A call costs **{measured.cost_seconds * 1e6:.1f} µs** more."
    return f"## Metrics\n\n{METERING}\n\n{cost}"


def openings(measured: Openings) -> str:
    rows = [
        ("an episode without servers: `initialize` to `tools/list`", measured.opened),
        ("the same, until its sandbox is removed", measured.removed),
        ("`docker run --rm --network none IMAGE python3 -c pass`", measured.docker_run),
    ]
    times = table(("one at a time", "p50 ms", "p99 ms"), (_times(name, of) for name, of in rows))
    ratios = [_ratios(name, of, measured.docker_run) for name, of in rows[:2]]
    return f"## Opening\n\n{OPENINGS}\n\n{times}\n\n{table(('/ `docker run`', 'p50', 'p99'), ratios)}"


def servers(measured: Servers) -> str:
    samples, slowest, combined = measured.samples, measured.slowest, measured.combined
    rows = [*((f"`{name}`", samples[name]) for name in SINGLE), ("all four", combined)]
    times = table(("set-up of a task", "p50 ms", "p99 ms"), (_times(name, of) for name, of in rows))
    total = sum((samples[name] for name in SINGLE[1:]), samples[SINGLE[0]])
    ratios = table(
        ("all four", "p50", "p99"),
        [
            _ratios(f"/ the slowest, `{slowest}`", combined, samples[slowest]),
            _ratios("/ the sum of the four", combined, total),
        ],
    )
    return f"## Four servers\n\n{SERVERS}\n\n{times}\n\n{ratios}"


def batch(measured: Batch) -> str:
    size = measured.size
    rows = [
        *_load(f"{size} sessions on {size} sandboxes", measured.through),
        *_load(f"{size} sessions on the tool server, direct, JSON", measured.direct),
        (f"open {size} episodes, s", f"{measured.open_seconds:.1f}"),
        (f"claim and grade {size} episodes, s", f"{measured.grade_seconds:.1f}"),
        ("rewards of 1.0", str(measured.rewarded)),
        (f"close {size} episodes until none remains, s", f"{measured.close_seconds:.1f}"),
        *((f"{kind} remaining", str(count)) for kind, count in measured.remaining.items()),
    ]
    return f"## {size} concurrent episodes\n\n{BATCH}\n\n{table(('quantity', 'value'), rows)}"


def attacks(machine: dict[str, str], outcomes: Sequence[Outcome], limit_gib: float) -> str:
    rows = (
        (
            outcome.attack,
            outcome.reply,
            "ended" if outcome.peak_mib is None else f"{outcome.peak_mib:.0f}",
            f"{outcome.worst_health_seconds * 1e3:.0f}",
            outcome.neighbour,
        )
        for outcome in outcomes
    )
    columns = ("attack", "reply", "peak memory MiB", "worst `/healthz` ms", "neighbour")
    head = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    return f"# Attacks\n\n{head}\n\n{ATTACKS.format(limit=limit_gib)}\n\n{table(columns, rows)}"


def _load(name: str, load: Load) -> list[tuple[str, ...]]:
    return [
        (f"{name}: calls per second", f"{load.calls_per_second:.0f}"),
        (f"{name}: CPU time of the server per call, µs", f"{load.cpu_seconds * 1e6:.0f}"),
    ]


def _times(name: str, samples: Samples) -> tuple[str, ...]:
    return name, f"{samples.p50 * 1e3:.2f}", f"{samples.p99 * 1e3:.2f}"


def _ratios(name: str, numerator: Samples, denominator: Samples) -> tuple[str, ...]:
    return (
        name,
        f"**{numerator.p50 / denominator.p50:.2f}**",
        f"{numerator.p99 / denominator.p99:.2f}",
    )


def table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [headings, ("---", *("---:" for _ in headings[1:])), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
