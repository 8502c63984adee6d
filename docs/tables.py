"""Writes settings, errors, the lobby's tools, metrics and throughput into the pages, from code and results.

    .venv/bin/python docs/tables.py

A page has `<!-- table: NAME -->` and `<!-- end -->`, and the lines between them are replaced. `tests/docs`
fails if a page is out of date. Tables about the tasks of Toolathlon and toolathlon_gym need a checkout, in
`DECATHLON_TOOLATHLON` and `DECATHLON_TOOLATHLON_GYM`.
"""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cyclopts.docs.markdown import generate_markdown_docs
from decathlon_client.client_errors import ClientError, error_from_code
from prometheus_client.core import Metric

from benchmarks import figures, report
from benchmarks.sections import SECTIONS
from decathlon_mcp.app import create_registry, read_catalogue  # imports every module with errors
from decathlon_mcp.catalogue.requirements import HostInfo, missing_requirements
from decathlon_mcp.cli.command_line import command_line
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.plugins.audit.attacks import attacks
from decathlon_mcp.plugins.metrics import Scrape, current_values, metrics_of
from decathlon_mcp.plugins.readiness.list_tasks import count_ways, way_to_run
from decathlon_mcp.protocol.lobby_tools import lobby_tools
from decathlon_mcp.protocol.results import CODES, STATUS, TOOL_FAILURES, error_code
from decathlon_mcp.settings import Settings
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.resources import KEY_SEPARATOR
from decathlon_mcp.suites.suite import Suite
from tests.audit.test_audit import DEFENCES, PLANTED
from tools.fidelity import audits
from tools.fidelity.calls import ATTEMPTS
from tools.fidelity.results import NOT_PLAYED, read
from tools.fidelity.solutions import SOLUTIONS

DOCS = Path(__file__).parent
INTERNAL = frozenset({"bad_settings", "bad_metrics"})
"""Codes that no client receives: the first ends a server's start, the second appears in a verdict's text."""
MAX_VALUES_SHOWN = 12
"""Values of a metric's label up to this number are listed."""
CHECKOUTS = {"toolathlon": "DECATHLON_TOOLATHLON", "gym": "DECATHLON_TOOLATHLON_GYM"}
"""Environment variables with the checkouts of the suites that tables are about."""
THROUGHPUT = {
    "sizes": (
        "until every episode was ready, standard library's server",
        "episodes graded per second, standard library's server",
        "calls per second, standard library's server",
        "memory of the machine per episode, standard library's server",
    ),
    "density": (
        "openings per second, with `--merge-pages`",
        "gradings per second, with `--merge-pages`",
        "memory per episode with one server, with `--merge-pages`",
    ),
}
"""Figures of the benchmarks' sections for planning a training run."""
THROUGHPUT_SIZES = (64, 1024)
ONE_EPISODE = {
    "calls": ("task address, handshake: p50", "episode address, sessionless: p50"),
    "openings": ("`initialize` to the tool list: p50", "`initialize` until the sandbox is removed: p50"),
    "memory": ("server memory per idle episode, connection included",),
}
"""Figures of the benchmarks' sections about one episode."""
RELEASES = {
    "verified": "Toolathlon-Verified",
    "before": "Before Toolathlon-Verified",
    "unknown": "Another release",
    "gym": "toolathlon_gym, tasks without a database",
}
"""Titles of the releases of Toolathlon."""
MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings() -> str:
    """The options of `serve` by section, as `--help-all` lists them."""
    options = generate_markdown_docs(
        command_line()["serve"], no_root_title=True, skip_preamble=True, generate_toc=False
    )
    # The default depends on who runs this and on their environment.
    options = re.sub(r"(`--state .*\*\[default: ).*(\]\*)", r"\1$XDG_STATE_HOME/decathlon-mcp\2", options)
    options = re.sub(r"^\*\*(.+)\*\*:$", r"## \1", options, flags=re.MULTILINE)
    return re.sub(r" \*\[choices: (.+?)\]\*", _unless_described, options).strip()


def _unless_described(choices: re.Match[str]) -> str:
    """The choices of an option, unless its description has each of them as code."""
    line = choices.string[: choices.start()].rpartition("\n")[2]
    described = all(f"`{choice}`" in line for choice in choices[1].split(", "))
    return "" if described else choices[0]


def errors() -> str:
    """The errors that clients receive, with their numbers."""
    return table(
        ("`data.code`", "JSON-RPC", "HTTP without an id", "ask again?", "what it says"),
        (
            (
                f"`{kind.code}`",
                "result, `isError`" if kind.code in TOOL_FAILURES else str(error_code(kind(""))),
                str(STATUS.get(kind.code, "")),
                "yes" if kind.retryable else "no",
                re.sub(r"(?<!\.)\.$", "", inspect.getdoc(kind) or ""),
            )
            for kind in _error_types()
        ),
    )


def error_codes() -> str:
    """The client's class for each code that has one of its own."""
    found = {kind.code: type(error_from_code(kind.code, "", {})) for kind in _error_types()}
    return table(
        ("`code`", "class"),
        [
            *((f"`{code}`", f"`{kind.__name__}`") for code, kind in found.items() if kind is not ClientError),
            ("`no_verdict`", "`NoVerdictError`"),
        ],
    )


def _error_types() -> list[type[DecathlonError]]:
    """In the order of `CODES`, then results, then internal errors."""
    order = {code: position for position, code in enumerate((*CODES, *sorted(TOOL_FAILURES)))}
    types = [kind for kind in DecathlonError.__subclasses__() if kind.code not in INTERNAL]
    return sorted(types, key=lambda kind: (order.get(kind.code, len(order)), kind.code))


def lobby() -> str:
    """The lobby's tools and their arguments, optional ones in brackets."""
    return table(("tool", "arguments", "what it does"), _lobby_rows())


def _lobby_rows() -> Iterator[tuple[str, str, str]]:
    for name, tool in lobby_tools().items():
        arguments = [
            f"`{argument}`" if field.is_required() else f"[`{argument}`]"
            for argument, field in tool.model_fields.items()
        ]
        yield f"`{name}`", " ".join(arguments), str(tool.definition()["description"])


def metrics() -> str:
    """The metrics of a server with one suite, and their labels with the values, unless these are many."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings.model_validate({"state": folder})
        registry = create_registry(read_catalogue(settings), {}, settings, folder)
        metrics = metrics_of(registry)
        families = list(Scrape(current_values(registry, metrics), metrics.registry).collect())
    return table(
        ("metric", "labels", "what it is"),
        (
            (
                f"`{family.name}{'_total' if family.type == 'counter' else ''}`",
                "; ".join(_labels(family)),
                family.documentation.removesuffix("."),
            )
            for family in families
            if family.name.startswith("decathlon_")
        ),
    )


def _labels(family: Metric) -> Iterator[str]:
    for label in dict.fromkeys(name for sample in family.samples for name in sample.labels):
        values = dict.fromkeys(sample.labels[label] for sample in family.samples if label in sample.labels)
        if label in ("suite", "version") or family.name == "decathlon_http_responses":
            yield f"`{label}`"
        elif label != "le":
            shown = ", ".join(values) if len(values) <= MAX_VALUES_SHOWN else "..."
            yield f"`{label}`: {shown}"


def throughput() -> str:
    """What batches took, from the results of the benchmarks."""
    return report.figures_table(
        replace(figure, floor=None, target=None)
        for figure in _selected(THROUGHPUT)
        if figure.size in THROUGHPUT_SIZES
    )


def one_episode() -> str:
    """What one episode costs, next to its floors, from the results of the benchmarks."""
    return report.figures_table(replace(figure, size=None, target=None) for figure in _selected(ONE_EPISODE))


def _selected(names: Mapping[str, Sequence[str]]) -> list[figures.Figure]:
    """Figures by the names of each section."""
    results = {result.section: result.figures for result in figures.read(SECTIONS)}
    return [
        figure
        for section, of_section in names.items()
        for name in of_section
        for figure in results[section]
        if figure.name == name
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [
        f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |"
        for row in (head, *rows)
    ]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def fidelity() -> str:
    """Verdicts and what upstream's command says, by release, and the tasks that were not played."""
    parts: list[str] = []
    for release, tasks in read().items():
        attempts = [attempt for task in tasks.values() for attempt in task.attempts.items()]
        agreeing = sum(attempt.agrees for _, attempt in attempts)
        parts.append(
            f"### {RELEASES[release]}\n\n{agreeing} of {len(attempts)} verdicts at "
            f"{len(tasks)} tasks are what upstream's command gives."
        )
        parts.append(
            table(
                ("task", "how it ran", *ATTEMPTS, "commit, day"),
                (
                    (
                        f"`{name}`{' ¹' if task.lacks_files else ''}",
                        task.way,
                        *(str(task.attempts.get(kind, "")) for kind in ATTEMPTS),
                        f"`{task.revision}`, {task.date}",
                    )
                    for name, task in tasks.items()
                ),
            )
        )
        complete = {name for name, task in tasks.items() if len(task.attempts) == len(ATTEMPTS)}
        if release != "gym" and (unplayed := [f"`{name}`" for name in SOLUTIONS if name not in complete]):
            parts.append(f"Not yet played in full at this release: {', '.join(unplayed)}.")
    parts.append(table(("not played", "why"), ((f"`{name}`", why) for name, why in NOT_PLAYED.items())))
    return "\n\n".join(parts)


def audit_table(release: str) -> str:
    """What audits found at the tasks of a release."""
    whole = audits.read().get(release, audits.AuditedRelease())
    if not (tasks := whole.tasks):
        return "Not audited yet."
    counts = Counter(task.verdict for task in tasks.values())
    played = sorted({(task.revision, task.date) for task in tasks.values()})
    when = ", ".join(f"`{revision}` on {day}" for revision, day in played)
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    attempts = sum(task.attempts for task in tasks.values())
    took = "" if whole.seconds is None else f", in {whole.seconds / 60:.1f} minutes"
    first = f"{len(tasks)} tasks: {found}. {attempts:,} attempts{took}. Commit {when}."
    return f"{first}\n\n{table(audits.HEAD, audits.rows(tasks))}"


def audit_costs(release: str) -> str:
    """What an empty attempt and a call cost at the tasks of a release."""
    whole = audits.read().get(release, audits.AuditedRelease())
    return table(("task", *audits.COST_HEAD), audits.cost_rows(whole.tasks))


def audit_attacks() -> str:
    """How many attacks there are, by what they need."""
    needs = {"file": "a tool that writes files", "shell": "a shell", "root": "a shell as root"}
    chosen = {need: [attack for attack in attacks() if attack.tool == need] for need in needs}
    return table(
        ("they need", "attacks", "in an attempt of their own", "at one task of an audit"),
        (
            (
                text,
                str(len(chosen[need])),
                str(sum(attack.alone for attack in chosen[need])),
                str(sum(attack.server for attack in chosen[need])),
            )
            for need, text in needs.items()
        ),
    )


def audit_planted() -> str:
    """The tasks with a planted fault, and what is found there."""
    rows = ((f"`{name}`", ", ".join(kinds) or "sound") for name, kinds in PLANTED.items())
    return table(("task of the tests", "verdict"), rows)


def audit_defences() -> str:
    """The defences that tests remove, and the attacks that earn then."""
    return table(
        ("removed defence", "verdict then", "what earns, of the attacks that are tried"),
        (
            (name, kind, ", ".join(f"`{attack}`" for attack in sorted(found)))
            for name, (_, _, kind, found) in DEFENCES.items()
        ),
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "audit-attacks": audit_attacks,
    "audit-before": partial(audit_table, "before"),
    "audit-costs": partial(audit_costs, "starter"),
    "audit-defences": audit_defences,
    "audit-gym": partial(audit_table, "gym"),
    "audit-planted": audit_planted,
    "audit-starter": partial(audit_table, "starter"),
    "audit-verified": partial(audit_table, "verified"),
    "fidelity": fidelity,
    "settings": settings,
    "errors": errors,
    "error-codes": error_codes,
    "lobby": lobby,
    "metrics": metrics,
    "throughput": throughput,
    "one-episode": one_episode,
}


def without_password(suite: Suite) -> str:
    """The tasks whose mail account lacks a password."""
    lacking = [
        task.id
        for task in suite.tasks.values()
        if any(KEY_SEPARATOR in credential for credential in task.needs.credentials)
    ]
    return "\n".join([f"{len(lacking)} tasks:", "", *(f"- `{name}`" for name in lacking)])


def ways(suite: Suite) -> str:
    """How each task can run, and the number of tasks for each way."""
    found = {
        task.id: way_to_run(suite, task, missing_requirements(suite, task, HostInfo()))
        for task in suite.tasks.values()
    }
    counts = ", ".join(f"{count} {text}" for text, count in count_ways(found.values()).items())
    rows = table(("task", "how it can run"), ((f"`{name}`", way.text) for name, way in sorted(found.items())))
    return f"Of the {len(found)} tasks: {counts}.\n\n{rows}"


CHECKOUT_TABLES: Mapping[str, tuple[str, Callable[[Suite], str]]] = {
    "gym-without-password": ("gym", without_password),
    "toolathlon-ways": ("toolathlon", ways),
}
"""Tables about a checkout, each with the suite's key in `CHECKOUTS`."""


def with_tables(page: str) -> str:
    """A page's text with its tables up to date; those about a checkout that is not given stay as they are.

    Raises KeyError for an unknown table.
    """
    return MARKED.sub(_with_table, page)


def _with_table(mark: re.Match[str]) -> str:
    name = mark["name"]
    if name not in CHECKOUT_TABLES:
        return f"{mark[1]}{TABLES[name]()}\n{mark[3]}"
    suite, write = CHECKOUT_TABLES[name]
    checkout = os.environ.get(CHECKOUTS[suite])
    return f"{mark[1]}{write(load_suite(checkout))}\n{mark[3]}" if checkout else mark[0]


def main() -> None:
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text("utf-8")
        if (current := with_tables(text)) != text:
            page.write_text(current, "utf-8")


if __name__ == "__main__":
    main()
