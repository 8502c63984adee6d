"""Parts of the audit: what tools can do, calls that fit schemas, answers, and the table of attacks."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

import jsonschema
import pytest
from decathlon_client.client_values import Tool

from decathlon_mcp.payloads import source
from decathlon_mcp.plugins.audit.abilities import (
    CallMaker,
    is_reading,
    is_removing,
    is_source,
    runners,
    writers,
)
from decathlon_mcp.plugins.audit.answers import read_answers
from decathlon_mcp.plugins.audit.attacks import attack_file, attacks, shell_command
from decathlon_mcp.plugins.audit.report import INTERRUPTED, Report, TaskReport
from decathlon_mcp.suites.loading import load_suite

SUITE = Path(__file__).parent / "suite"
DOCUMENT = Path(__file__).parents[2] / "docs/reward-integrity.md"
TEXT = {"type": "string"}


def tool(name: str, *, annotations: dict[str, Any] | None = None, **properties: dict[str, Any]) -> Tool:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return Tool.read({"name": name, "inputSchema": schema, "annotations": annotations or {}})


@pytest.mark.parametrize(
    ("name", "properties", "call"),
    [
        ("terminal__run_command", {"command": TEXT}, {"command": "id"}),
        ("box__bash", {"cmd": {"anyOf": [TEXT, {"type": "null"}]}}, {"cmd": "id"}),
    ],
)
def test_a_tool_that_runs_commands_is_found(name: str, properties: dict[str, Any], call: object) -> None:
    (runner,) = runners([tool("files__read_file", path=TEXT), tool(name, **properties)])
    assert (runner.tool, runner.call("id")) == (name, call)


def test_python_runs_commands_too(capfd: pytest.CaptureFixture[str]) -> None:
    (runner,) = runners([tool("local__python_execute", code=TEXT)])
    exec(runner.call("echo $((6*7))")["code"], {})
    assert capfd.readouterr().out.strip() == "42"


def test_tools_that_write_read_and_remove_are_told_apart() -> None:
    write, read, remove = (
        tool("files__write_file", path=TEXT, content=TEXT),
        tool("files__list_directory", path=TEXT),
        tool("files__delete_file", path=TEXT),
    )
    assert [writer.tool for writer in writers([read, write, remove])] == ["files__write_file"]
    assert list(map(is_reading, (write, read, remove))) == [False, True, False]
    assert list(map(is_removing, (write, read, remove))) == [False, False, True]


def test_a_tool_is_a_source_if_the_prompt_names_its_server_and_it_changes_nothing() -> None:
    ask, write = tool("how-to__recommendMeals", query=TEXT), tool("how-to__create_recipe", title=TEXT)
    read, run = tool("how-to__read_file", path=TEXT), tool("how-to__get_command_output", command=TEXT)
    prompt = "Query the “how to” server."
    assert [is_source(each, prompt) for each in (ask, write, read, run)] == [True, False, False, False]
    assert not is_source(ask, "Say how-tos matter.")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    "properties": {
        "at": {"$ref": "#/$defs/Point"},
        "count": {"type": "integer", "minimum": 3, "maximum": 5},
        "kind": {"enum": ["a", "b"]},
        "names": {"type": "array", "items": TEXT, "minItems": 2},
        "maybe": {"anyOf": [TEXT, {"type": "null"}]},
        "flag": {"type": ["boolean", "null"]},
    },
    "required": ["at", "count", "kind", "names", "maybe", "flag"],
}


@pytest.mark.parametrize("seed", range(5))
def test_calls_fit_the_schema_and_are_the_same_for_the_same_seed(seed: int) -> None:
    described = Tool.read({"name": "a__b", "inputSchema": SCHEMA})
    arguments = CallMaker(str(seed), ["a.csv"]).arguments(described)
    jsonschema.validate(arguments, SCHEMA)
    assert CallMaker(str(seed), ["a.csv"]).arguments(described) == arguments


def test_answers_are_what_nobody_can_know() -> None:
    suite = load_suite(str(SUITE), "en")
    answers = read_answers(suite, suite.task("leaky"), "Write into `answer.txt` how the story ends.")
    assert answers.outputs == ("answer.txt",)
    seen = answers.seen_in("… the 7th of the 9 lamps in the harbour is the green one …")
    assert seen == "the ground truth's answer.txt: 'the 7th of the 9 lamps in the ha'"
    echo = "there is no file 'the 7th of the 9 lamps in the harbour'"
    assert answers.seen_in(echo, '{"path": "the 7th of the 9 lamps in the harbour"}') is None
    assert answers.seen_in("It was dark. Nine lamps, three colours; count them yourself.") is None


def test_what_the_prompt_says_is_no_answer() -> None:
    suite = load_suite(str(SUITE), "en")
    prompt = "Copy: the 7th of the 9 lamps in the harbour is the green one"
    assert not read_answers(suite, suite.task("leaky"), prompt).parts


def test_each_attack_has_a_name_of_its_own() -> None:
    names = [attack.name for attack in attacks()]
    assert len(names) == len(set(names))
    assert f"the {len(names)} attacks" in (DOCUMENT.parent / "audit.md").read_text("utf-8")


def test_each_row_of_the_page_has_an_attack_or_the_reason_why_it_has_none() -> None:
    text = DOCUMENT.read_text("utf-8").partition("\n## Attacks")[2].partition("\n## What preprocess")[0]
    lines = [line[2:] for line in text.splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith(("attack |", "--"))]
    reasons = attack_file().elsewhere
    carried_out = {row for row in rows if any(row.startswith(attack.row) for attack in attacks())}
    elsewhere = {row for row in rows if any(row.startswith(beginning) for beginning in reasons)}
    assert [row for row in rows if row not in carried_out | elsewhere] == []
    assert carried_out & elsewhere == set()
    beginnings = [*reasons, *(attack.row for attack in attacks())]
    assert [text for text in beginnings if not any(row.startswith(text) for row in rows)] == []


def test_names_in_an_attack_cannot_leave_their_quotes() -> None:
    (first, *_) = attacks()
    text = shell_command(first, root="/r", task="/r/it's", workspace="/r/w", outputs=["a'; touch x; '"])
    assert "TASK=" + quote("/r/it's") in text
    assert "touch x" not in text  # a name with a blank is left out


def test_a_task_whose_attacks_were_interrupted_is_sound_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [
        TaskReport(task=name, skipped=skipped, rewards={"null": 0.0, "reads": 0.0})
        for name, skipped in (("a", {}), ("b", {"forger too-deep": INTERRUPTED}))
    ]
    assert Report("", "", None, tasks).finish() == 0
    b, a, *_ = capsys.readouterr().out.splitlines()
    assert a == "a\tsound\t2 attempts"
    assert b == f"b\tsound so far\t2 attempts; attacks not carried out: 1 ({INTERRUPTED})"


LATER = """
import datetime
class Kind(type):
    pass
class Day(datetime.date, metaclass=Kind):
    pass
print(isinstance(Day(2025, 1, 1), datetime.date), datetime.date.today().year)
"""


def test_classes_that_derive_from_a_date_can_be_made_where_the_clock_is_ahead(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LATER)
    order = json.dumps({"seconds": 400 * 86_400, "environment": {"TZ": "Pacific/Kiritimati"}})
    shim = source("inside", "decathlon_mcp.plugins.audit")
    done = subprocess.run(
        [sys.executable, "-c", shim, order, str(program)], capture_output=True, text=True, check=True
    )
    is_date, year = done.stdout.split()
    assert is_date == "True"
    assert int(year) > datetime.now(UTC).year
