"""`verify` and `key`: whose verdicts they are, from files as clients and servers keep them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import httpx2
import pytest

from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.grading.verdict import verdict_of
from tests.grading.scene import attempt_of
from tests.probe.clients import connected, start
from tests.probe.serving import Served, serving

if TYPE_CHECKING:
    from tests.cli.conftest import Shell


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.at(tmp_path / "state" / "decathlon-mcp")


def scored(signer: Signer, reward: float = 1.0, **fields: Any) -> dict[str, Any]:
    attempt = attempt_of(**fields)
    return signer.sign(verdict_of(attempt, status="scored", success=True, reward=reward)).to_json()


def kept(shell: Shell, *values: Any, indent: int | None = None) -> str:
    (shell.folder / "kept").write_text("\n".join(json.dumps(value, indent=indent) for value in values))
    return "kept"


def test_a_verdict_of_this_machines_server_verifies_by_itself(shell: Shell, signer: Signer) -> None:
    done = shell.run("verify", kept(shell, scored(signer), indent=2))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ok  kept: paper scored reward 1.0, episode e1: signed\n"


def test_of_many_it_says_which_do_not(shell: Shell, signer: Signer) -> None:
    good, worse = scored(signer), {**scored(signer), "reward": 2.0}
    done = shell.run("verify", kept(shell, good, worse, good, {**good, "signature": None}))
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["ok", "kept:1:"],
        ["BAD", "kept:2:"],
        ["ok", "kept:3:"],
        ["BAD", "kept:4:"],
    ]
    assert "its signature does not fit" in done.stdout
    assert done.stdout.endswith("it is not signed\n")
    assert done.stderr == "decathlon-mcp: 2 of 4 do not verify\n"


def test_replies_of_evaluate_are_looked_into(shell: Shell, signer: Signer) -> None:
    told = scored(signer)
    replies: list[Any] = [
        told,
        {"content": [], "structuredContent": told, "isError": False},
        {"jsonrpc": "2.0", "id": 1, "result": {"structuredContent": told}},
        {"content": [], "_meta": {"decathlon/verdict": told}},
    ]
    done = shell.run("verify", kept(shell, *replies))
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 4), done


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{}", "no verdict"),
        ("[1, 2]", "no verdict"),
        ("null", "no verdict"),
        ('{"reward": 1', "not JSON"),
        ('{"episode": "e", "reward": NaN}', "NaN is not a number"),
        ('{"episode": "e"}', "it is not signed"),
        ('{"episode": "e"}\n{"broken', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_verdict_does_not_verify(shell: Shell, signer: Signer, text: str, words: str) -> None:
    (shell.folder / "kept").write_text(text)
    done = shell.run("verify", "kept")
    assert done.returncode == 1
    assert words in done.stdout
    assert "Traceback" not in done.stderr


def test_a_reward_that_is_there_twice_does_not_verify(shell: Shell, signer: Signer) -> None:
    """Some parsers would take the one, some the other."""
    text = json.dumps(scored(signer))
    (shell.folder / "kept").write_text('{"reward": 0.0, ' + text.removeprefix("{"))
    done = shell.run("verify", "kept")
    assert done.returncode == 1
    assert "duplicate name" in done.stdout


def test_its_own_words_cannot_draw_on_the_terminal(shell: Shell, signer: Signer) -> None:
    file = kept(shell, {"episode": "\x1b[2K\rok  e", "status": "s\ncored", "task": "t" * 1000})
    done = shell.run("verify", file)
    assert "\x1b" not in done.stdout
    assert done.stdout.count("\n") == 1
    assert len(done.stdout) < 300


def test_another_key_is_given_in_any_spelling(shell: Shell, signer: Signer, tmp_path: Path) -> None:
    other = Signer.at(tmp_path / "other")
    file = kept(shell, scored(other))
    refused = shell.run("verify", file)
    assert refused.returncode == 1
    assert f"another key, {other.public.id}" in refused.stdout
    told = other.public.to_json()
    (shell.folder / "told.json").write_text(json.dumps(told))
    for key in (told["key"], other.public.raw.hex(), "told.json"):
        assert shell.run("verify", file, "--key", key).returncode == 0, key
    assert shell.run("verify", file, "--state", str(tmp_path / "other")).returncode == 0
    both = ("--key", signer.public.raw.hex(), "--key", told["key"])
    assert shell.run("verify", kept(shell, scored(other), scored(signer)), *both).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing",), "missing: No such file"),
        (("kept", "--key", "nonsense"), "not an Ed25519 public key; expected a file"),
        (("kept", "--key", "http://127.0.0.1:9"), "Connection refused"),
        (("kept", "--state", "elsewhere"), "there is no server key in elsewhere"),
    ],
)
def test_what_cannot_be_checked_is_one_line(
    shell: Shell, signer: Signer, words: tuple[str, ...], said: str
) -> None:
    kept(shell, scored(signer))
    assert said in shell.fault("verify", *words, status=1)


def test_key_tells_the_public_half_and_never_the_other(shell: Shell, tmp_path: Path) -> None:
    first, second = shell.run("key"), shell.run("key")
    assert first.stdout == second.stdout
    told = json.loads(first.stdout)
    assert told.keys() == {"algorithm", "id", "key"}
    assert Signer.at(tmp_path / "state" / "decathlon-mcp").public.to_json() == told


@pytest.fixture
async def served(tmp_path: Path, anyio_backend: object) -> AsyncGenerator[Served]:
    async with serving(tmp_path / "served", provider="local") as served:
        yield served


@pytest.mark.anyio
async def test_what_a_server_gave_and_what_it_kept_verify_with_its_address(
    served: Served, shell: Shell
) -> None:
    """Scored or not: every verdict is signed, and only a scored one has a reward."""
    replies: list[Any] = []
    for task in ("find-answer", "crashing-verdict", "failing-preprocess"):
        started = await start(served, task, wait=False)
        async with connected(served.lobby) as lobby:
            reply = await lobby.call_tool("evaluate", {"episode": started["episode"]})
        replies.append(reply.model_dump(mode="json", by_alias=True))
        file = served.state / "episodes" / started["episode"] / "verdict.json"
        verify = partial(shell.run, "verify", str(file), "--key", served.url)
        done = await anyio.to_thread.run_sync(verify)
        assert done.returncode == 0, done
        assert json.loads(file.read_text()) == replies[-1]["structuredContent"]
    statuses = [reply["structuredContent"]["status"] for reply in replies]
    assert statuses == ["scored", "evaluator_error", "set_up_failed"]
    assert ["reward" in reply["structuredContent"] for reply in replies] == [True, False, False]
    verify = partial(shell.run, "verify", kept(shell, *replies), "--key", f"{served.url}/mcp")
    done = await anyio.to_thread.run_sync(verify)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 3), done


@pytest.mark.anyio
async def test_the_key_is_told_to_whoever_asks(served: Served) -> None:
    async with httpx2.AsyncClient() as http:
        answer = await http.get(f"{served.url}/.well-known/decathlon-key")
    assert answer.json() == Signer.at(served.state).public.to_json()
