"""MCP server `lab`: simulates a batch reactor. Run as `lab_server.py WORKSPACE`.

A run takes some seconds and reports progress; a cancelled run writes no file.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from workspace import Workspace

STAGES = 10
STAGE_SECONDS = 0.25
MINUTES = 60
RUNS = "runs"

READ_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=False)
ADDITIVE = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)

workspace = Workspace(sys.argv[1])
server = MCPServer("lab", log_level="WARNING")


@dataclass(frozen=True)
class Minute:
    """State of the batch at the end of a minute: shares of the charge in per cent, heat in kW."""

    minute: int
    feed: float
    product: float
    waste: float
    heat: float


def batch(temperature: int, catalyst: float) -> Iterator[Minute]:
    """Simulate two first-order reactions, feed to product and product to waste, in steps of one second.

    `temperature` is in °C, `catalyst` in g. A higher temperature accelerates both reactions, the second one
    more; more catalyst accelerates only the first.
    """
    inverse_difference = 1 / 343.15 - 1 / (temperature + 273.15)
    first = 0.012 * catalyst * math.exp(5200 * inverse_difference)
    second = 0.0095 * math.exp(11000 * inverse_difference)
    feed, product, heat = 100.0, 0.0, 0.0
    for minute in range(1, MINUTES + 1):
        for _ in range(60):
            produced, wasted = feed * first / 60, product * second / 60
            feed, product = feed - produced, product + produced - wasted
            heat = max(heat, 60 * (3.5 * produced + 6.0 * wasted))
        yield Minute(minute, feed, product, 100 - feed - product, heat)


@server.tool(annotations=READ_ONLY, structured_output=False)
def describe_reactor() -> str:
    """Describe the reactor: what it does, what can be set, what is measured."""
    return (
        "A stirred batch reactor. Each batch starts with 100 % feed; feed turns into product, and product "
        "turns into waste.\n"
        "To set: temperature, whole °C from 50 to 95; catalyst, 1 to 5 g in steps of 0.5 g.\n"
        "Measured: the share of feed, product and waste, and the peak heat (kW) so far, "
        f"each minute up to {MINUTES}."
    )


@server.tool(annotations=ADDITIVE, structured_output=False)
async def run_simulation(
    name: Annotated[
        str, Field(pattern=r"^[a-z0-9-]{1,40}$", description="Name of the result; a-z, 0-9 and -.")
    ],
    temperature: Annotated[int, Field(ge=50, le=95, description="°C")],
    catalyst: Annotated[float, Field(ge=1, le=5, multiple_of=0.5, description="g")],
    ctx: Context,
) -> str:
    """Simulate one batch of an hour; takes a few seconds. Writes runs/NAME.csv, one line per minute."""
    target = workspace.resolve(f"{RUNS}/{name}.csv")
    if target.exists():
        raise ToolError(f"There is already a run {name!r}")
    minutes, course = batch(temperature, catalyst), list[Minute]()
    for stage in range(1, STAGES + 1):
        await anyio.sleep(STAGE_SECONDS)
        course += [next(minutes) for _ in range(MINUTES // STAGES)]
        await ctx.report_progress(stage, STAGES, f"minute {course[-1].minute} of {MINUTES}")
    lines = [f"{m.minute},{m.feed:.2f},{m.product:.2f},{m.waste:.2f},{m.heat:.3f}\n" for m in course]
    target.parent.mkdir(exist_ok=True)
    target.write_text("minute,feed_percent,product_percent,waste_percent,peak_heat_kw\n" + "".join(lines))
    best = max(course, key=lambda minute: minute.product)
    return (
        f"{temperature} °C, {catalyst} g. Most product: {best.product:.2f} % at minute {best.minute}. "
        f"Peak heat: {course[-1].heat:.3f} kW. The whole course is in {workspace.name(target)}"
    )


if __name__ == "__main__":
    server.run()
