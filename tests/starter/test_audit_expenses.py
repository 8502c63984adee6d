"""audit-expenses: the metrics of its rubric, and attempts that look like a solution but are wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from tests.starter.bench import Bench
from tests.starter.conftest import LayOut

pytestmark = pytest.mark.anyio
TASK = "audit-expenses"


def metrics(bench: Bench) -> dict[str, float]:
    """Return the result of the rubric's function, called as the rubric file defines."""
    code = (
        "import importlib, json, pathlib, sys\n"
        f"module = importlib.import_module('tasks.starter.{TASK}.evaluation.evaluator')\n"
        "sys.stderr.write(json.dumps(module.evaluate(*map(pathlib.Path, sys.argv[1:]))))\n"
    )
    paths = [str(bench.workspace), str(bench.folder / "groundtruth_workspace")]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], cwd=bench.root, check=True, capture_output=True, text=True
    )
    return json.loads(done.stderr)


def test_doing_nothing_earns_nothing(lay_out: LayOut) -> None:
    assert not any(metrics(lay_out(TASK)).values())


async def test_the_rubric_weighs_every_metric(right: Bench) -> None:
    rubric = yaml.safe_load((right.folder / "evaluation" / "rubric.yaml").read_text())
    found = metrics(right)
    assert set(rubric["weights"]) == set(found)
    assert set(found.values()) == {1}


async def test_flagging_everything_finds_nothing(right: Bench) -> None:
    flags = [f"{claim},{rule}" for claim in range(1, 35) for rule in range(1, 8)]
    (right.workspace / "findings.csv").write_text("\n".join(["id,rule", *flags]) + "\n")
    assert (metrics(right)["found"], metrics(right)["exact"]) == (0, False)
    right.assert_fails("found is 0.00")


async def test_missing_one_is_nearly_right_and_still_a_fail(right: Bench) -> None:
    right.edit("findings.csv", "22,3\n", "")
    assert 0.9 < metrics(right)["found"] < 1
    right.assert_fails("found is 0.9")


async def test_a_false_alarm_is_nearly_right_and_still_a_fail(right: Bench) -> None:
    right.edit("findings.csv", "21,7\n", "20,3\n21,7\n")
    assert 0.9 < metrics(right)["found"] < 1
    right.assert_fails("found is 0.9")


async def test_naming_a_finding_twice_fails(right: Bench) -> None:
    right.edit("findings.csv", "22,3\n", "22,3\n22,3\n")
    right.assert_fails("exact")


@pytest.mark.parametrize("field", ["claimed_eur", "approved_eur"])
@pytest.mark.parametrize("value", [1979.36, float("inf"), True, None, "many", [1979.92]])
async def test_a_wrong_sum_fails(right: Bench, field: str, value: object) -> None:
    right.edit_json("totals.json", **{field: value})
    right.assert_fails(f"{field.removesuffix('_eur')}_total")
