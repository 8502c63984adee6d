"""`play --script`: calls from a file, the verdict on stdout, the status a pass or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import anyio
import pytest
from decathlon_client.script import Step, read_steps
from decathlon_client.values import CLAIM

from decathlon_mcp.cli.app import run as run_words
from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.http.authentication import Tokens, new_token
from decathlon_mcp.starter import oracle, oracle_ids
from tests.cli.conftest import COMMAND
from tests.probe.serving import SUITE, serving

RIGHT = '{"tool": "probe__write", "arguments": {"path": "answer.txt", "text": "42"}}\n{"claim_done": {}}\n'


@dataclass(frozen=True, slots=True)
class Done:
    """What a command came to."""

    status: int
    out: str
    err: str


Play = Callable[..., Done]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Play:
    """The command, in this process: what it imports is imported once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)

    def run(*words: str, given: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", StringIO(given))
        status = run_words(["play", *words])
        said = capsys.readouterr()
        return Done(status, said.out, said.err)

    return run


def test_a_script_that_solves_its_task_passes(play: Play) -> None:
    done = play(
        "find-answer",
        "--suite",
        SUITE,
        "--provider",
        "local",
        "--state",
        "state",
        "--script",
        "-",
        given=RIGHT,
    )
    assert done.status == 0, done.err
    verdict = json.loads(done.out)
    assert (verdict["reward"], verdict["claimed"], verdict["metrics"]["calls"]) == (1.0, True, 1)
    assert "→ probe__write" in done.err
    assert "isolates nothing" not in done.err


def test_a_script_that_does_not_solve_its_task_is_told_so_and_fails(play: Play, tmp_path: Path) -> None:
    script = tmp_path / "wrong.jsonl"
    script.write_text('{"tool": "probe__fail"}\n{"tool": "probe__bare", "expect": "bare"}\n')
    done = play(
        "find-answer", "--suite", SUITE, "--provider", "local", "--state", "state", "--script", str(script)
    )
    assert done.status == 1
    verdict = json.loads(done.out)
    assert (verdict["reward"], verdict["claimed"], verdict["metrics"]["failed_calls"]) == (0.0, False, 1)


def test_a_reply_that_is_not_what_was_expected_ends_the_script(play: Play) -> None:
    line = '{"tool": "probe__bare", "expect": "something"}'
    done = play(
        "find-answer",
        "--suite",
        SUITE,
        "--provider",
        "local",
        "--state",
        "state",
        "--script",
        "-",
        given=line,
    )
    assert (done.status, done.out) == (1, "")
    assert done.err.splitlines()[-1] == (
        "decathlon-mcp: probe__bare answered something else than the script expects: 'something'"
    )


@pytest.mark.anyio
async def test_the_same_against_a_server_that_runs_already_with_its_token(tmp_path: Path) -> None:
    secret, line = new_token("tester", "player")
    listed = tmp_path / "tokens"
    listed.write_text(line)
    listed.chmod(0o600)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    with anyio.fail_after(120):
        async with serving(tmp_path / "served", provider="local", tokens=Tokens.read(listed)) as served:
            done = await anyio.run_process(
                [*COMMAND, "play", "find-answer", "--url", served.url, "--script", "-"],
                input=RIGHT.encode(),
                env={**clean, "DECATHLON_TOKEN": secret},
                cwd=tmp_path,
            )
    assert json.loads(done.stdout)["reward"] == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "the player needs a terminal; without one: decathlon-mcp play TASK --script FILE"),
        (("--script", "-"), "a script plays one task: decathlon-mcp play TASK --script FILE"),
        (("find-answer", "--script", "nowhere.jsonl"), "nowhere.jsonl: No such file or directory"),
        (("x", "--script", "-", "--url", "nowhere"), "not the address of a server, "),
    ],
)
def test_what_cannot_be_played_is_one_line(play: Play, words: tuple[str, ...], said: str) -> None:
    done = play(*words)
    assert (done.status, done.out) == (1, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"decathlon-mcp: {said}")


def test_without_textual_a_script_plays_and_the_player_says_what_is_missing() -> None:
    code = (
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] in ('textual', 'jsonschema'):\n"
        "            raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        "import decathlon_mcp.cli.play, importlib.util\n"
        "importlib.util.find_spec = lambda name: None\n"
        "decathlon_mcp.cli.play.require_player()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert DecathlonError.__name__ in done.stderr
    assert "the player needs Textual: pip install 'decathlon-mcp[server,play]'" in done.stderr


def test_every_oracle_is_a_script() -> None:
    for task in oracle_ids():
        assert oracle(task)[-1].tool == CLAIM


def test_steps_may_leave_out_what_they_do_not_need() -> None:
    assert read_steps('{"tool": "a"}\n\n{"claim_done": null}\n{"tool": "claim_done"}') == [
        Step("a"),
        Step(CLAIM),
        Step(CLAIM),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON: "),
        ("[]", 'line 2: a step is {"tool": NAME'),
        ('{"tool": "a", "claim_done": {}}', 'line 2: a step is {"tool": NAME'),
        ('{"name": "a"}', "line 2: there is nothing called name in a step"),
        ('{"tool": 5}', "line 2: a tool is named by a text"),
        ('{"tool": "a", "arguments": []}', None),
        ('{"tool": "a", "arguments": [1]}', "line 2: a tool is named by a text, and its arguments are"),
        ('{"tool": "a", "expect": 5}', "line 2: what is expected is a text"),
    ],
)
def test_a_line_that_is_no_step_is_named(line: str, said: str | None) -> None:
    if said is None:
        assert read_steps(f"\n{line}") == [Step("a")]
        return
    with pytest.raises(ValueError, match="line 2") as told:
        read_steps(f"\n{line}")
    assert str(told.value).startswith(said)
