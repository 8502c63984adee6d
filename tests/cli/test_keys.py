"""`verify` and `key`: signatures of verdicts in files of clients and servers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from decathlon_client import Result, Verdict
from decathlon_client.resume import AttemptKey, verdict_record

from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.grading.verdict import Outcome, build_verdict
from decathlon_mcp.types import public_id
from tests.cli.conftest import Shell
from tests.grading.support import make_attempt
from tests.probe.clients import connected, start
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.slow


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.at(tmp_path / "state" / "decathlon-mcp")


def scored(signer: Signer, reward: float = 1.0, **fields: Any) -> dict[str, Any]:
    attempt = make_attempt(**fields)
    return signer.sign(
        build_verdict(attempt, Outcome(status="scored", success=True, reward=reward))
    ).to_json()


def write_file(shell: Shell, *values: Any, indent: int | None = None) -> str:
    (shell.folder / "verdicts").write_text("\n".join(json.dumps(value, indent=indent) for value in values))
    return "verdicts"


def test_each_of_several_verdicts_is_reported(shell: Shell, signer: Signer) -> None:
    good, worse = scored(signer), {**scored(signer), "reward": 2.0}
    another = scored(signer, episode="e2")
    done = shell.run("verify", write_file(shell, good, worse, another, {**good, "signature": None}))
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["ok", "verdicts:1:"],
        ["BAD", "verdicts:2:"],
        ["ok", "verdicts:3:"],
        ["BAD", "verdicts:4:"],
    ]
    assert "its signature does not match" in done.stdout
    assert done.stdout.endswith("it is not signed\n")
    assert done.stderr == "decathlon-mcp: 2 of 4 do not verify\n"
    done = shell.run("verify", write_file(shell, worse, good))
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["BAD", "ok"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[1, 2]", "no verdict"),
        ('{"episode": "e", "reward": NaN}', "NaN is not a number"),
        # Parsers disagree about which of two members with one name counts.
        ('{"episode": "e", "reward": 0.0, "reward": 1.0}', "duplicate name"),
        ('{"episode": "e"}\n{"broken', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_document_without_a_valid_verdict_does_not_verify(
    shell: Shell, signer: Signer, text: str, message: str
) -> None:
    (shell.folder / "verdicts").write_text(text)
    done = shell.run("verify", "verdicts")
    assert done.returncode == 1
    assert message in done.stdout
    assert "Traceback" not in done.stderr


def test_a_verdict_that_is_counted_twice_does_not_verify(shell: Shell, signer: Signer) -> None:
    verdict, other = scored(signer), scored(signer, reward=0.5)
    done = shell.run("verify", write_file(shell, verdict, verdict, {"structuredContent": verdict}, other))
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok", "BAD", "BAD", "BAD"]
    assert "the verdict of this episode was already counted: verdicts:1" in done.stdout
    write_file(shell, verdict)
    (shell.folder / "copy").symlink_to("verdicts")
    assert shell.run("verify", "verdicts", "verdicts").returncode == 1
    assert shell.run("verify", "verdicts", "copy").returncode == 1


@pytest.mark.parametrize(
    ("folder", "linked"),
    [
        ("ab" * 24, None),
        ("AB" * 24, None),
        ("episodes/mine", None),
        ("cd" * 24, "file"),
        ("cd" * 24, "folder"),
    ],
)
def test_a_verdict_in_the_folder_of_another_episode_does_not_verify(
    shell: Shell, signer: Signer, folder: str, linked: str | None
) -> None:
    place = shell.folder / folder
    place.parent.mkdir(exist_ok=True)
    real = shell.folder / "elsewhere"
    real.mkdir()
    (real / "verdict.json").write_text(json.dumps(scored(signer, episode=public_id("ab" * 24))))
    if linked == "folder":
        place.symlink_to(real)
    else:
        place.mkdir()
        if linked == "file":
            (place / "verdict.json").symlink_to(real / "verdict.json")
        else:
            (real / "verdict.json").rename(place / "verdict.json")
    done = shell.run("verify", f"{folder}/verdict.json")
    assert (done.returncode == 0) is (folder == "ab" * 24), done
    assert ("another episode" in done.stdout) is (folder != "ab" * 24)


def test_a_document_with_two_different_verdicts_does_not_verify(shell: Shell, signer: Signer) -> None:
    verdict = scored(signer)
    for other in (scored(signer, reward=0.5), {**verdict, "reward": True}, {"status": "scored", "reward": 1}):
        reply = {"structuredContent": verdict, "_meta": {"decathlon/verdict": other}}
        assert "two different verdicts" in shell.run("verify", write_file(shell, reply)).stdout


def test_a_batchs_file_of_verdicts_verifies(shell: Shell, signer: Signer, tmp_path: Path) -> None:
    result: Result[None] = Result(0, "task", 0, 0, "e1", None, Verdict.read(scored(signer)), None, None, 1.0)
    with verdict_record(tmp_path / "resumed") as record:
        assert record is not None
        record.append(AttemptKey("task", 0, 0), result, "run", None)
    line = json.loads((tmp_path / "resumed").read_text())
    line["episode"] = line["verdict"]["episode"]
    assert shell.run("verify", write_file(shell, line)).returncode == 0
    for change in ({"episode": "another"}, {"reward": 1.0}, {"status": "scored"}):
        done = shell.run("verify", write_file(shell, {**line, **change}))
        assert (done.returncode, "two different verdicts" in done.stdout) == (1, True), change


def test_control_characters_of_a_verdict_are_not_printed(shell: Shell, signer: Signer) -> None:
    file = write_file(shell, {"episode": "\x1b[2K\rok  e", "status": "s\ncored", "task": "t" * 1000})
    done = shell.run("verify", file)
    assert "\x1b" not in done.stdout
    assert done.stdout.count("\n") == 1
    assert len(done.stdout) < 300


def test_a_key_can_be_base64_hexadecimal_or_a_file(shell: Shell, signer: Signer, tmp_path: Path) -> None:
    other = Signer.at(tmp_path / "other")
    file = write_file(shell, scored(other))
    refused = shell.run("verify", file)
    assert refused.returncode == 1
    assert f"another key, {other.public.id}" in refused.stdout
    public = other.public.to_json()
    (shell.folder / "public.json").write_text(json.dumps(public))
    for key in (public["key"], other.public.raw.hex(), "public.json"):
        assert shell.run("verify", file, "--key", key).returncode == 0, key
    assert shell.run("verify", file, "--state", str(tmp_path / "other")).returncode == 0
    both = write_file(shell, scored(other), scored(signer, episode="e2"))
    keys = ("--key", signer.public.raw.hex(), "--key", public["key"])
    assert shell.run("verify", both, *keys).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing",), "missing: No such file"),
        (("verdicts", "--key", "nonsense"), "not an Ed25519 public key; expected a file"),
        (("verdicts", "--key", "http://127.0.0.1:9"), "Connection refused"),
        (("verdicts", "--state", "elsewhere"), "--state: elsewhere does not exist"),
        (("verdicts", "--state", "."), "there is no server key in ."),
    ],
)
def test_a_missing_file_or_key_is_an_error(
    shell: Shell, signer: Signer, arguments: tuple[str, ...], message: str
) -> None:
    write_file(shell, scored(signer))
    assert message in shell.error("verify", *arguments, status=1)


def test_key_prints_only_the_public_key(shell: Shell, tmp_path: Path) -> None:
    first, second = shell.run("key"), shell.run("key")
    assert first.stdout == second.stdout
    public = json.loads(first.stdout)
    assert public.keys() == {"algorithm", "id", "key"}
    assert Signer.at(tmp_path / "state" / "decathlon-mcp").public.to_json() == public


@pytest.fixture
async def served(tmp_path: Path, anyio_backend: object) -> AsyncGenerator[Served]:
    async with serving(tmp_path / "served", provider="host") as served:
        yield served


@pytest.mark.anyio
async def test_verdicts_of_a_server_verify_with_its_url(served: Served, shell: Shell) -> None:
    """Every verdict is signed, with and without a reward."""
    replies: list[Any] = []
    for task in ("find-answer", "crashing-verdict", "lost-verdict", "failing-preprocess"):
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
    assert statuses == ["scored", "forfeited", "sandbox_lost", "set_up_failed"]
    assert ["reward" in reply["structuredContent"] for reply in replies] == [True, True, False, False]
    verify = partial(shell.run, "verify", write_file(shell, *replies), "--key", f"{served.url}/mcp")
    done = await anyio.to_thread.run_sync(verify)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 4), done
