"""Spans in a real collector, and the dashboard's queries in a real Prometheus.

Not collected by default, because it installs programs. Run it by name:

    python -m pytest tests/telemetry/collectors.py

It needs `prometheus` (on Debian: apt-get install prometheus), and PyPI for a collector and for `mcp` 1.x.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND
from tests.docs.pages import REPOSITORY, SERVER, below, block
from tests.ports import free_port

PAGE = "docs/operating.md"
DASHBOARD = REPOSITORY / "packaging" / "grafana" / "decathlon-mcp.json"
INSTALL_SECONDS = 600
WAIT_SECONDS = 60
"""How long a program may take on a busy machine."""
VALUES = {"$__rate_interval": "1h", "$instance": ".*"}
"""Of the dashboard's variables. The counters are as old as the server."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * INSTALL_SECONDS)]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@contextmanager
def running(
    command: Sequence[str | Path], log: Path, variables: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """A program whose output goes to `log`, in that folder; ended with the context."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=log.parent,
            env={**os.environ, **(variables or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(WAIT_SECONDS)


@dataclass(slots=True)
class Span:
    """What the collector has written about a span; the names of `members` are the collector's."""

    service: str
    members: dict[str, str] = field(default_factory=dict[str, str])
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    events: list[str] = field(default_factory=list[str])

    @property
    def name(self) -> str:
        return self.members["Name"]


@dataclass(frozen=True, slots=True)
class Observed:
    """A server that sends spans to a collector, and is scraped by Prometheus."""

    url: str
    prometheus: str
    collector_log: Path
    variables: dict[str, str]

    def play(self, folder: Path) -> str:
        """Run the page's program and return its output."""
        program = folder / "traced.py"
        program.write_text(block(PAGE, "Traces", "python").text.replace(SERVER, self.url))
        return subprocess.run(
            [sys.executable, program],
            env={**os.environ, **self.variables},
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            timeout=WAIT_SECONDS,
            check=True,
        ).stdout

    def spans(self) -> list[Span]:
        """The spans in the log of the collector."""
        spans: list[Span] = []
        service = ""
        for line in map(str.strip, self.collector_log.read_text().splitlines()):
            if line.startswith("Span #"):
                spans.append(Span(service))
            elif match := re.fullmatch(r"-> service\.name: Str\((.*)\)", line):
                service = match[1]
            elif spans and (match := re.fullmatch(r"-> Name: (.*)", line)):
                spans[-1].events.append(match[1])
            elif spans and (match := re.fullmatch(r"-> ([\w.]+): \w+\((.*)\)", line)):
                spans[-1].attributes[match[1]] = match[2]
            elif spans and (match := re.fullmatch(r"([\w ]+?)\s*: (.*)", line)):
                spans[-1].members.setdefault(match[1], match[2])
        return spans

    def has_span(self, name: str) -> bool:
        return any(span.name == name for span in self.spans())

    def query(self, expression: str) -> list[float]:
        """The values of an expression in Prometheus, one for each series."""
        words = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.prometheus}/api/v1/query?{words}", timeout=10) as response:
            result = json.load(response)["data"]["result"]
        return [float(series["value"][1]) for series in result]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    assert shutil.which("prometheus"), "there is no prometheus; on Debian: apt-get install prometheus"
    folder = tmp_path_factory.mktemp("observed")
    otlp, scrapes = free_port(), free_port()
    # As the page says, except for the ports.
    _, collector = below(PAGE, "Traces", "sh")
    install, start = collector.text.splitlines()
    subprocess.run(install, shell=True, cwd=folder, check=True, timeout=INSTALL_SECONDS)
    ports = {
        "ROTEL_OTLP_HTTP_ENDPOINT": f"127.0.0.1:{otlp}",
        "ROTEL_OTLP_GRPC_ENDPOINT": f"127.0.0.1:{free_port()}",
    }
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{otlp}"}
    ready = folder / "url"
    log = folder / "collector.log"
    words = ("--spans", "--port", "0", "--state", folder / "state", "--ready-file", ready, "--no-supervisor")
    with ExitStack() as stack:
        stack.enter_context(running(("sh", "-c", f"exec {start}"), log, ports))
        until(lambda: "Starting Rotel" in log.read_text(), "the collector did not start")
        server_log = folder / "server.log"
        command = (*COMMAND, "serve", *words)
        stack.enter_context(running(command, server_log, variables))
        until(ready.exists, f"the server did not start: {server_log.read_text()}")
        url = ready.read_text().strip()
        # The page's configuration, every second.
        (scraping,) = below(PAGE, "Metrics", "yaml")
        text = scraping.text.partition("    # On a server with tokens")[0]
        address = SERVER.removeprefix("http://")
        assert address in text
        configuration = folder / "prometheus.yml"
        configuration.write_text(
            "global: {scrape_interval: 1s}\n" + text.replace(address, url.removeprefix("http://"))
        )
        options = (f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'series'}")
        options = (*options, f"--web.listen-address=127.0.0.1:{scrapes}")
        stack.enter_context(running(("prometheus", *options), folder / "prometheus.log"))
        observed = Observed(url, f"http://127.0.0.1:{scrapes}", log, variables)

        def is_scraped() -> bool:
            try:
                return observed.query("decathlon_info") == [1.0]
            except OSError:
                return False

        # Before the first episode, so that what it counts is an increase.
        until(is_scraped, f"nothing was scraped: {(folder / 'prometheus.log').read_text()}")
        yield observed


def test_one_trace_leads_from_the_clients_span_to_the_call_in_the_sandbox(
    observed: Observed, tmp_path: Path
) -> None:
    assert observed.play(tmp_path).endswith("0.0\n")
    until(lambda: observed.has_span("attempt"), "the client's spans did not come")
    until(lambda: observed.has_span("grade"), "the server's spans did not come")
    found = observed.spans()
    trace = next(span.members["Trace ID"] for span in reversed(found) if span.name == "attempt")
    by_id = {span.members["ID"]: span for span in found if span.members["Trace ID"] == trace}
    spans = {span.name: span for span in by_id.values()}
    assert len(spans) == len(by_id), f"a span is there twice: {sorted(spans)}"

    def above(span: Span) -> list[str]:
        """The names of the spans from its parent to the first."""
        parent = by_id.get(span.members.get("Parent ID", ""))
        return [] if parent is None else [parent.name, *above(parent)]

    parents = {name: above(span) for name, span in spans.items()}
    for tool in ("start_episode", "files__list_directory", "claim_done", "evaluate"):
        assert parents[f"tools/call {tool}"] == [f"MCP send tools/call {tool}", "attempt"]
    assert parents["execute_tool list_directory"][0] == "tools/call files__list_directory"
    assert parents["set_up"][0] == "tools/call start_episode"
    assert parents["grade"][0] == "tools/call claim_done"
    assert spans["tools/call evaluate"].members["Kind"] == "SPAN_KIND_SERVER"
    assert (
        spans["tools/call evaluate"].service
        == spans["execute_tool list_directory"].service
        == "decathlon-mcp"
    )
    assert spans["attempt"].service != "decathlon-mcp"
    assert spans["grade"].events == ["gen_ai.evaluation.result"]
    assert spans["grade"].attributes["gen_ai.evaluation.score.label"] == "fail"


def expressions() -> list[tuple[str, str]]:
    """The dashboard's queries, with the titles of their panels and with values for its variables."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]
    for name, value in VALUES.items():
        found = [(title, expression.replace(name, value)) for title, expression in found]
    assert not [expression for _, expression in found if "$" in expression]
    return found


def test_every_query_of_the_dashboard_has_values(observed: Observed, tmp_path: Path) -> None:
    observed.play(tmp_path)
    ended = (
        'sum(decathlon_episodes_ended_total{suite="starter"}) > 0 and sum(decathlon_evaluations_total) > 0'
    )
    until(lambda: observed.query(ended) != [], "the end of the episode was not scraped")
    unanswered: list[str] = []
    queries = expressions()
    for title, expression in queries:
        values = observed.query(expression)
        if not values or not all(map(math.isfinite, values)):
            unanswered.append(f"{title}: {expression}: {values}")
    assert len(queries) > 40
    assert unanswered == []
    # A query can have no values, so none of the above is true of everything.
    assert observed.query("decathlon_no_such_metric") == []


def test_prometheus_accepts_the_alerts_of_the_page(tmp_path: Path) -> None:
    file = tmp_path / "rules.yml"
    file.write_text(block(PAGE, "Alerts", "yaml").text)
    command = ("promtool", "check", "rules", file)
    assert b"3 rules found" in subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=True).stdout
