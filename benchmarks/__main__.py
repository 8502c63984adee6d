"""`python -m benchmarks [SECTION...]`: measure, and print each section as it is ready.

Status 1 if a section failed or left anything behind.
"""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace

import anyio

from benchmarks import figures, report
from benchmarks.running import Options
from benchmarks.sections import SECTIONS, measure
from decathlon_mcp.sandboxes.machine_limits import raise_descriptor_limit

DEFAULTS = Options()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} [all]")
    parser.add_argument("--write", action="store_true", help="write the results to benchmarks/results")
    parser.add_argument(
        "--short", action="store_true", help="do everything a few times, to see that it works"
    )
    parser.add_argument(
        "--image", default=DEFAULTS.image, help="image with Python and the MCP SDK [%(default)s]"
    )
    parser.add_argument("--repeats", type=int, help=f"how often each figure is measured [{DEFAULTS.repeats}]")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        help=f"numbers of concurrent episodes [{' '.join(map(str, DEFAULTS.sizes))}]",
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.sections if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    options = Options.short(arguments.image) if arguments.short else Options(arguments.image)
    if arguments.repeats:
        options = replace(options, repeats=arguments.repeats)
    if arguments.sizes:
        options = replace(options, sizes=tuple(sorted(arguments.sizes)))
    raise_descriptor_limit()
    # So that everything is closed, as after Ctrl-C, which a shell lets background jobs ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    failed = False
    for name in arguments.sections or SECTIONS:
        result = anyio.run(measure, name, options, backend_options={"use_uvloop": True})
        sys.stdout.write(report.section(result, SECTIONS[name].title, SECTIONS[name].text) + "\n\n")
        sys.stdout.flush()
        failed = failed or result.failed
        if arguments.write and not result.failed and result.figures:
            figures.write(result)
    sys.exit(failed)


def _interrupt(_number: int, _frame: object) -> None:
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
