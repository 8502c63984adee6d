"""`play --script`: calls from a file, verdict on stdout, exit status 0 for a pass."""

from __future__ import annotations

import json
import os
import re
import webbrowser
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import httpx2
import pytest
from decathlon_client.script import read_steps

from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.http.authentication import Tokens, new_token
from tests.cli.conftest import COMMAND, Shell
from tests.page.sites import HTML, OWN, sign_in
from tests.probe.serving import SUITE, serving

RIGHT = '{"tool": "probe__write", "arguments": {"path": "answer.txt", "text": "42"}}\n{"claim_done": {}}\n'
ON_PROBE = ("find-answer", "--suite", SUITE, "--provider", "host", "--state", "state", "--script", "-")


def test_script_that_solves_its_task_exits_with_zero(shell: Shell) -> None:
    done = shell.run("play", *ON_PROBE, given=RIGHT)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert (verdict["reward"], verdict["claimed"], verdict["metrics"]["calls"]) == (1.0, True, 1)
    assert "→ probe__write" in done.stderr
    assert "isolates nothing" not in done.stderr


def test_script_that_does_not_solve_its_task_exits_with_one(shell: Shell) -> None:
    done = shell.run(
        "play", *ON_PROBE, given='{"tool": "probe__fail"}\n{"tool": "probe__bare", "expect": "bare"}\n'
    )
    assert done.returncode == 1
    verdict = json.loads(done.stdout)
    assert (verdict["reward"], verdict["claimed"], verdict["metrics"]["failed_calls"]) == (0.0, False, 1)
    done = shell.run("play", *ON_PROBE, given='{"tool": "probe__bare", "expect": "something"}')
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "decathlon-mcp: probe__bare answered something else than the script expects: 'something'"
    )


@pytest.mark.anyio
async def test_script_plays_on_a_running_server_with_a_token(tmp_path: Path, shell: Shell) -> None:
    secret, line = new_token("tester", "player")
    (tmp_path / "tokens").write_text(line)
    (tmp_path / "script").write_text(RIGHT)
    tokens = Tokens.read(tmp_path / "tokens")
    async with serving(tmp_path / "served", provider="host", tokens=tokens) as served:
        words = ("find-answer", "--url", served.url, "--script", str(tmp_path / "script"))
        done = await anyio.to_thread.run_sync(partial(shell.run, "play", *words, DECATHLON_TOKEN=secret))
    assert json.loads(done.stdout)["reward"] == 1.0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing", "--provider", "host"), "there is no task 'nothing'"),
        (("--script", "-"), "a script plays one task: decathlon-mcp play TASK --script FILE"),
        (("x", "--script", "-", "--url", "nowhere"), "url: not the address of a server, "),
    ],
)
def test_error_is_one_line(shell: Shell, words: tuple[str, ...], message: str) -> None:
    done = shell.run("play", *words)
    assert (done.returncode, done.stdout) == (2 if words[0] == "nothing" else 1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"decathlon-mcp: {message}")


def test_the_variable_selects_a_server_unless_a_suite_is_named(shell: Shell) -> None:
    shell.environment["DECATHLON_URL"] = "http://127.0.0.1:1"
    done = shell.run("play", "find-answer", "--script", "-", given=RIGHT)
    assert "no server answers at http://127.0.0.1:1" in done.stderr
    assert shell.run("play", *ON_PROBE, given=RIGHT).returncode == 0
    shell.environment["DECATHLON_URL"] = "nowhere"
    assert (
        "DECATHLON_URL: not the address of a server"
        in shell.run("play", "find-answer", "--script", "-").stderr
    )


@pytest.mark.anyio
async def test_by_hand_the_page_opens_at_the_task_with_its_key_in_a_browser(tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.new\nmv {opened}.new {opened}\n')
    browser.chmod(0o755)
    sanitize = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    words = [*COMMAND, "play", "find-answer", "--suite", SUITE, "--provider", "host", "--state", "state"]
    with anyio.fail_after(120):
        async with await anyio.open_process(
            words, env={**sanitize, "BROWSER": f"{browser} %s &"}, cwd=tmp_path
        ) as process:
            assert process.stdout is not None
            # Stdout may be a log here, and gets no key.
            printed = (await process.stdout.receive()).decode().split()[0]
            key = (tmp_path / "state" / "page-key").read_text().strip()
            assert printed.endswith("/play?task=find-answer")
            while not opened.exists():  # noqa: ASYNC110  (another process writes it)
                await anyio.sleep(0.02)
            assert opened.read_text().strip() == f"{printed}#key={key}"
            # As the browser's page does, by the key behind `#`.
            url = printed.partition("/play")[0].replace("decathlon.localhost", "127.0.0.1")
            async with httpx2.AsyncClient(base_url=url, headers={**HTML, **OWN}) as client:
                await sign_in(client, key)
                page = (await client.get("/play?task=find-answer")).text
                form = dict(re.findall(r'<input type="hidden" name="(task|nonce)" value="([^"]*)">', page))
                assert form["task"] == "find-answer"
                started = await client.post("/play/start", data=form)
                assert started.status_code == 303
                attempt = await client.get(started.headers["location"])
                assert 'data-phase="' in attempt.text, attempt.text
            process.terminate()
            assert await process.wait() == 0
    assert (tmp_path / "state" / "play.log").exists()


def test_by_hand_on_a_running_server_its_page_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.get", lambda: (_ for _ in ()).throw(webbrowser.Error()))
    done = shell.run("play", "--url", "http://127.0.0.1:1/")
    assert done.stdout == "http://127.0.0.1:1/play\n"
    assert "no server answers at http://127.0.0.1:1; " in done.stderr
    assert (
        shell.run("play", "a b", "--url", "http://127.0.0.1:1/mcp").stdout
        == "http://127.0.0.1:1/play?task=a+b\n"
    )
    done = shell.run("play", "--url", "http://xn--\xfc.test")
    assert "no server answers at http://xn--\xfc.test; " in done.stderr


def test_separators_of_lines_in_a_string_end_no_step() -> None:
    (step,) = read_steps('{"tool": "a", "arguments": {"text": "one\u2028two\x85three"}}\r\n')
    assert step.arguments == {"text": "one\u2028two\x85three"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON: "),
        ("[]", 'line 2: a step is {"tool": NAME'),
        ('{"name": "a"}', "line 2: a step has no member name"),
        ('{"tool": "a", "arguments": [1]}', "line 2: `tool` must be a string, and `arguments` an object"),
        ('{"tool": "a", "expect": 5}', "line 2: `expect` must be a string"),
    ],
)
def test_invalid_line_is_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match="line 2") as caught:
        read_steps(f"\n{line}")
    assert str(caught.value).startswith(message)
