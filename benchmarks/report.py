"""The numbers as Markdown: for a terminal, for a file."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.batch import Batch, Load
from benchmarks.calls import DIRECT, FLOORS, STREAM, WAYS, Calls, Processes
from benchmarks.openings import Openings
from benchmarks.samples import Samples
from benchmarks.servers import ALONE, Servers

CALLS = """\
The legs are measured in turns with the calls: the same tool server called directly over the SDK's HTTP on
loopback (answering in JSON, the fastest that the SDK can, and in events, as it does by itself), and the same
call over a container's bare attached stream (the tool server its first process, spoken to in raw lines on a
blocking socket). Every way has an SDK client of its own, all in one process."""
PROCESSES = "A call through the server and a sandbox, and what one costs where each starts a process."
OPENINGS = "From the client's `initialize` to the answered `tools/list`, over HTTP, a container in between."
SERVERS = """\
From `initialize` to the answered `tools/list` of tasks with one server each, and of one with all four, in
turns. `excel`, `git` and `echo` are Python on the MCP SDK and compute while they start (they import): where
there are fewer cores than servers, four of them take at least what all compute, divided by the cores. `plain`
is the standard library alone."""
BATCH = "Opened all at once, called for some seconds by bare HTTP clients, claimed, graded, closed."


def head(machine: dict[str, str]) -> str:
    return "# What it costs\n\n" + "\n".join(f"- {name}: {value}" for name, value in machine.items())


def calls(measured: Calls) -> str:
    taken = measured.taken
    rows = [
        *((f"{where}, {era}", taken[where, era]) for where, era in WAYS),
        *((f"leg: {where}, {era}", taken[where, era]) for where, era in DIRECT),
        ("leg: attached stream", taken[STREAM]),
    ]
    times = _table(("a call of 100 bytes", "p50 ms", "p99 ms"), (_times(name, of) for name, of in rows))
    ratios = _table(
        ("through the server and a sandbox / the sum of its legs", "p50", "p99"),
        (
            _ratios(f"{where}, {era} / {direct} + stream", taken[where, era], measured.legs(direct, era))
            for where, era in WAYS
            for direct in FLOORS
        ),
    )
    return f"## A call\n\n{CALLS}\n\n{times}\n\n{ratios}"


def processes(measured: Processes) -> str:
    rows = [("a call", measured.call), ("`docker exec python3 -c 'import mcp'`", measured.process)]
    times = _table(("in turns", "p50 ms", "p99 ms"), (_times(name, of) for name, of in rows))
    less = measured.process.p50 / measured.call.p50
    said = f"A call costs **{less:.0f} times** less."
    return f"## A call, and a process for each call\n\n{PROCESSES}\n\n{times}\n\n{said}"


def openings(measured: Openings) -> str:
    rows = [
        ("an episode without servers: `initialize` to `tools/list`", measured.episode),
        ("the same until its sandbox is removed", measured.whole),
        ("`docker run --rm --network none IMAGE python3 -c pass`", measured.run),
    ]
    times = _table(("one at a time", "p50 ms", "p99 ms"), (_times(name, of) for name, of in rows))
    ratios = [_ratios(name, of, measured.run) for name, of in rows[:2]]
    return f"## Opening\n\n{OPENINGS}\n\n{times}\n\n{_table(('/ `docker run`', 'p50', 'p99'), ratios)}"


def servers(measured: Servers) -> str:
    taken, slowest, together = measured.taken, measured.slowest, measured.together
    rows = [*((f"`{name}` alone", taken[name]) for name in ALONE), ("the four together", together)]
    times = _table(("set-up of a task", "p50 ms", "p99 ms"), (_times(name, of) for name, of in rows))
    after_another = sum((taken[name] for name in ALONE[1:]), taken[ALONE[0]])
    ratios = _table(
        ("the four together", "p50", "p99"),
        [
            _ratios(f"/ the slowest alone, `{slowest}`", together, taken[slowest]),
            _ratios("/ the sum of all alone", together, after_another),
        ],
    )
    return f"## Four servers\n\n{SERVERS}\n\n{times}\n\n{ratios}"


def batch(measured: Batch) -> str:
    size = measured.size
    rows = [
        *_load(f"{size} sessions on {size} sandboxes", measured.through),
        *_load(f"{size} sessions on the tool server, direct, JSON", measured.direct),
        (f"{size} episodes opened at once, s", f"{measured.open_seconds:.1f}"),
        (f"{size} claimed and graded at once, s", f"{measured.grade_seconds:.1f}"),
        ("rewards of 1.0", str(measured.rewarded)),
        (f"{size} closed at once until none is left, s", f"{measured.close_seconds:.1f}"),
        *((f"{kind} left", str(count)) for kind, count in measured.left.items()),
    ]
    return f"## {size} at once\n\n{BATCH}\n\n{_table(('what', 'measured'), rows)}"


def _load(name: str, load: Load) -> list[tuple[str, ...]]:
    return [
        (f"{name}: calls a second", f"{load.calls_per_second:.0f}"),
        (f"{name}: CPU time of the server for a call, µs", f"{load.cpu_seconds * 1e6:.0f}"),
    ]


def _times(name: str, samples: Samples) -> tuple[str, ...]:
    return name, f"{samples.p50 * 1e3:.2f}", f"{samples.p99 * 1e3:.2f}"


def _ratios(name: str, over: Samples, under: Samples) -> tuple[str, ...]:
    return name, f"**{over.p50 / under.p50:.2f}**", f"{over.p99 / under.p99:.2f}"


def _table(names: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [names, ("---", *("---:" for _ in names[1:])), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
