"""docs/operating.md and the dashboard against the code: the states, metrics and labels.

`tests/telemetry/collectors.py` runs the alerts and the dashboard in a real Prometheus.
"""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import yaml

from decathlon_mcp.grading.verdict import Status
from decathlon_mcp.plugins.metrics import Metrics
from tests.docs.pages import DOCS, REPOSITORY, blocks, tables

PAGE = DOCS / "operating.md"


def test_the_metrics_and_statuses_in_the_alerts_exist() -> None:
    (alerts,) = (block for block in blocks(PAGE, "yaml") if block.heading == "Alerts")
    rules: list[dict[str, Any]] = yaml.safe_load(alerts.text)["groups"][0]["rules"]
    assert len(rules) == 3
    expressions = " ".join(rule["expr"] for rule in rules)
    (table,) = (table for table in tables(PAGE) if table.heading == "Metrics")
    known = {row[0].strip("`") for row in table.rows}
    used = set(re.findall(r"\b(?:decathlon|process)_\w+", expressions))
    assert len(used) >= 3
    known |= {family.name for family in Metrics().registry.collect()}
    assert used <= known
    (statuses,) = re.findall(r'status=~"([\w|]+)"', expressions)
    assert set(statuses.split("|")) <= set(get_args(Status))


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    panels = json.loads((REPOSITORY / "packaging" / "grafana" / "decathlon-mcp.json").read_text())["panels"]
    shown = {re.sub(r"_bucket$", "", name) for panel in panels for name in _metrics_in(panel)}
    (table,) = (table for table in tables(PAGE) if table.heading == "Metrics")
    known = {row[0].strip("`") for row in table.rows}
    assert {name for name in shown if name.startswith("decathlon_")} == known
    processes = {sample.name for family in Metrics().registry.collect() for sample in family.samples}
    assert {name for name in shown if name.startswith("process_")} <= processes


def _metrics_in(panel: dict[str, Any]) -> list[str]:
    expressions = " ".join(target["expr"] for target in panel.get("targets", ()))
    return re.findall(r"\b(?:decathlon|process)_\w+", expressions)
