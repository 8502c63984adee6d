"""The parts of the benchmarks, and how one of them is run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from benchmarks.calls import measure_calls
from benchmarks.figures import Figures, SectionResult
from benchmarks.machine import machine
from benchmarks.memory import measure_density, measure_memory
from benchmarks.openings import measure_gradings, measure_openings
from benchmarks.proxies import measure_proxies
from benchmarks.running import Options, Run, UnavailableError
from benchmarks.servers import measure_servers
from benchmarks.sizes import measure_sizes
from benchmarks.watching import measure_watching


@dataclass(frozen=True, slots=True)
class Section:
    """`text`: what is measured and what with, in Markdown."""

    title: str
    text: str
    measure: Callable[[Run, Figures], Awaitable[None]]


SECTIONS: dict[str, Section] = {
    "calls": Section(
        "One tool call",
        """\
A call of 100 bytes takes turns with its two legs: the same tool server called directly over the SDK's HTTP
on loopback (with JSON responses, the SDK's fastest format, and with events, its default), and the same call
over a container's attached stream (the tool server is the first process; raw lines on a blocking socket).
The client is the SDK's, one for each path, all in one process. With `--spans` a server sends them to a
collector that keeps nothing; its CPU time is compared with that of another server in the same run.""",
        measure_calls,
    ),
    "openings": Section(
        "Opening a sandbox",
        """\
Episodes without MCP servers, one after another, without sandboxes that were opened ahead, in turns with
`docker run` of the same image.""",
        measure_openings,
    ),
    "grading": Section(
        "Gradings",
        """\
A batch of episodes without MCP servers is opened at once, then claimed and graded at once: by a server that
opens each grader's sandbox when it is needed, and by one with `--pool` that opens them ahead while the
episodes are open. The floor is the first one's openings.""",
        measure_gradings,
    ),
    "memory": Section(
        "Memory of the server",
        """\
Growth of the server's resident memory with the number of open episodes, half a minute after the last was
opened, when the server has collected its garbage. Their tool server starts with its first call, and none is
called.""",
        measure_memory,
    ),
    "sizes": Section(
        "Cost against size",
        """\
Batches of episodes are opened at once, each is called, all are called without pause by a minimal client,
claimed, graded and closed. Floors are measured at the same number of sessions in the same run: *a* is the
SDK's own server called directly over HTTP (JSON responses, uvloop, the same HTTP parser), *b* the same tool
server as the first process of as many containers, over their attached streams.""",
        measure_sizes,
    ),
    "density": Section(
        "Memory of live episodes",
        """\
Episodes with two tool servers that import the MCP SDK, more than 128 with one, all called once. Memory is
what the whole machine has less, with the engine's part, after the kernel has merged pages.""",
        measure_density,
    ),
    "proxies": Section(
        "Other proxies",
        """\
The same tool server behind other MCP proxies, called by the same client, in turns. They run it as a process
of their own: mcp-proxy one for all sessions, the others one for each.""",
        measure_proxies,
    ),
    "servers": Section(
        "Starts of servers",
        """\
Episodes on the provider `host`, in turns on two servers: one with `--preload`, on which servers are forks,
and one without. An episode calls each server of its task once: one server on the MCP SDK, or that and
another one, git and Excel. CPU time and memory are those of the servers after their first reply. Then batches
of episodes are opened at once and called at once; an episode before has cached the lists of tools.""",
        measure_servers,
    ),
    "watching": Section(
        "Reading what was played",
        """\
A state folder with 100,000 episodes in 50 runs of 40 tasks, an episode of 10,000 calls with replies of
1,000 bytes, and a trajectory of 256 MiB with replies of 1 MiB, read as commands and pages do. Pages are made
in this process, without a network; 20 viewers ask for one each at the same time.""",
        measure_watching,
    ),
}
"""By name, in the order of the page."""


async def measure(name: str, options: Options) -> SectionResult:
    """Run one section. What goes wrong is in the result's `errors`."""
    before, start = machine(), time.perf_counter()
    run, figures, errors = Run(options, secrets.token_hex(8)), Figures(), list[str]()
    try:
        await SECTIONS[name].measure(run, figures)
    except UnavailableError as error:
        run.skipped[SECTIONS[name].title] = str(error)
    except Exception as error:  # noqa: BLE001  (the other sections are still measured)
        errors += [f"{type(one).__name__}: {one}" for one in _leaves(error)]
    remaining = await run.count_remaining()
    seconds = time.perf_counter() - start
    return SectionResult(name, before, seconds, figures.all(), remaining, tuple(errors), run.skipped)


def _leaves(error: Exception) -> list[Exception]:
    if isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        return [leaf for inner in group.exceptions for leaf in _leaves(inner)]
    return [error]
