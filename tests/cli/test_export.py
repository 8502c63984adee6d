"""`export` and `runs --leaderboard`, over a state folder."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.cli.command_line import run
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.grading.verdict import Outcome, build_verdict
from decathlon_mcp.plugins.page import one_file as one_file_module
from decathlon_mcp.starter import oracle_ids
from decathlon_mcp.types import JsonObject, public_id
from tests.grading.support import make_attempt
from tests.history.stored_episodes import LIVE, LOST, NOW, Call, Folder, Note
from tests.page.test_hostile import HOSTILE, Shape

HANDLES = [f"{number:048x}" for number in range(1, 5)]
LONG = "x" * 100_000


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def signed(state: Path, handle: str, reward: float) -> JsonObject:
    attempt = make_attempt(episode=public_id(handle))
    outcome = Outcome(status="scored", success=reward == 1, reward=reward)
    return Signer.at(state).sign(build_verdict(attempt, outcome)).to_json()


def fill(state: Path) -> list[str]:
    """A run with a success, a failure, a lost and a live episode; their public ids."""
    entries = [
        Note("First I look. \ud800"),
        Call(arguments={"path": LONG}, reply=LONG),
        Call("files__write_file", reply="no such folder", failed=True),
        Call(reply={"content": [], "isError": False, "number": 1, "deep": {"a": [1, None]}}),
        Call(reply=None),
        Note("Done.", "reasoning"),
    ]
    with Folder(state) as folder:
        return [
            folder.add(
                handle,
                labels={"run": "monday", "model": "m", "attempt": str(number)},
                reward=[1.0, 0.0, LOST, LIVE][number],
                started_at=NOW + number,
                entries=entries if number == 0 else [Call()],
                verdict=signed(state, handle, 1.0 - number) if number < 2 else None,
            )
            for number, handle in enumerate(HANDLES)
        ]


def export(state: Path, *words: str | Path) -> int:
    return run(["export", *map(str, words), "--state", str(state)])


def assert_no_handles(content: bytes) -> None:
    assert not [handle for handle in HANDLES if handle.encode() in content]


@pytest.mark.parametrize("parent", ["missing", "/proc"])  # no file can be created in /proc
@pytest.mark.parametrize("to", ["jsonl", "html", "harbor"])
def test_output_that_cannot_be_created_is_one_line(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, parent: str
) -> None:
    won, *_ = fill(state)
    out = tmp_path / parent / "out"
    words = {"html": [won], "jsonl": ["--all"], "harbor": []}[to]
    assert export(state, *words, "--to", to, "--output", out) == 1
    message = f"cannot create {out}: No such file or directory; name a place in a folder that exists"
    assert capsys.readouterr().err == f"decathlon-mcp: {message}\n"


def test_jsonl_has_an_episode_a_line_with_whole_values_and_a_verdict_that_verifies(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    won, failed, lost, _ = fill(state)
    out = tmp_path / "run.jsonl"
    assert export(state, "monday", "--to", "jsonl", "--output", out) == 0
    assert "those that have not finished are left out" in capsys.readouterr().err
    episodes = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [episode["id"] for episode in episodes] == [won, failed, lost]
    entries = episodes[0]["entries"]
    assert [entry.get("call", entry.get("role")) for entry in entries] == [
        "assistant", 1, 2, 3, 4, "reasoning",
    ]  # fmt: skip
    assert entries[1]["arguments"] == {"path": LONG}
    assert entries[1]["reply"]["content"][0]["text"] == LONG
    assert entries[2]["failed"] is True
    assert entries[3]["reply"]["deep"] == {"a": [1, None]}
    assert entries[4]["reply"] is None
    assert episodes[2]["reward"] is None
    assert episodes[2]["lost"]
    assert_no_handles(out.read_bytes())
    first = tmp_path / "two.jsonl"
    first.write_text("".join(out.read_text("utf-8").splitlines(keepends=True)[:2]))
    assert run(["verify", str(first), "--state", str(state)]) == 0
    first.write_text(first.read_text().replace('"success":true', '"success":false'))
    assert run(["verify", str(first), "--state", str(state)]) == 1


def test_parquet_has_tables_of_episodes_calls_and_notes(state: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    won, failed, lost, _ = fill(state)
    out = tmp_path / "tables"
    assert export(state, "--all", "--to", "parquet", "--output", out) == 0
    parquet: Any = pyarrow.parquet
    read = parquet.read_table
    episodes = read(out / "episodes.parquet").to_pylist()
    assert [row["episode"] for row in episodes] == [won, failed, lost]
    assert dict(episodes[0]["labels"]) == {"run": "monday", "model": "m", "attempt": "0"}
    assert [row["success"] for row in episodes] == [True, False, None]
    calls = [row for row in read(out / "calls.parquet").to_pylist() if row["episode"] == won]
    assert [row["call"] for row in calls] == [1, 2, 3, 4]
    assert json.loads(calls[0]["arguments"]) == {"path": LONG}
    assert json.loads(calls[0]["reply"])["content"][0]["text"] == LONG
    assert [row["text"] for row in read(out / "notes.parquet").to_pylist()] == ["First I look. ?", "Done."]
    verdict = tmp_path / "verdict.json"
    verdict.write_text(episodes[0]["verdict"])
    assert run(["verify", str(verdict), "--state", str(state)]) == 0
    for file in out.iterdir():
        assert_no_handles(file.read_bytes())


def test_an_existing_output_is_replaced_only_with_force_and_only_an_earlier_export(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(state)
    file, folder = tmp_path / "run.jsonl", tmp_path / "tables"
    file.write_text("old")
    assert export(state, "monday", "--to", "jsonl", "--output", file) == 1
    assert "exists; --force replaces it" in capsys.readouterr().err
    assert file.read_text() == "old"
    assert export(state, "monday", "--to", "jsonl", "--output", file, "--force") == 0
    assert len(file.read_text().splitlines()) == 3
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    assert export(state, "monday", "--to", "parquet", "--output", folder, "--force") == 1
    assert "--force replaces only an earlier export" in capsys.readouterr().err
    (folder / "mine.txt").rename(folder / "old.parquet")
    assert export(state, "monday", "--to", "parquet", "--output", folder, "--force") == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["calls.parquet", "episodes.parquet", "notes.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.jsonl", "state", "tables"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "jsonl", "--output", "out", "friday"), "is of run 'friday'"),
        (("monday", "--output", "out", "--all", "--to", "jsonl"), "give the name of a run, or --all"),
        (("--all", "--output", "out", "--to", "html"), "--to html writes one episode"),
        (("monday", "--to", "jsonl", "-o", "out", "--split", "test"), "--to jsonl writes episodes"),
        (("monday", "--to", "harbor", "-o", "out"), "leave RUN and --all out"),
    ],
)
def test_wrong_words_are_named(
    words: tuple[str, ...], message: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(state)
    assert export(state, *words) == (2 if "friday" in words else 1)
    assert message in capsys.readouterr().err


class OneFile(Shape):
    """The elements of a document that needs nothing else, and in which nothing runs."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "form", "button", "iframe", "object", "base")
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "href":
                assert re.match(r"#|data:application/json;base64,", value or "")
            if name == "src":
                assert (value or "").startswith("data:image/")
        self.elements.append(f"{tag} {sorted(name for name, _ in attrs)}")


def one_file(state: Path, out: Path, public_id: str) -> str:
    assert export(state, public_id, "--to", "html", "--output", out) == 0
    assert_no_handles(out.read_bytes())
    return out.read_text("utf-8")


def test_one_file_shows_an_episode_without_scripts_and_its_verdict_verifies(
    state: Path, tmp_path: Path
) -> None:
    won, *_ = fill(state)
    page = one_file(state, tmp_path / "episode.html", won)
    OneFile(page)
    assert page.index('charset="utf-8"') < 1000
    assert "default-src 'none'" in page
    assert "First I look. ⟨U+D800⟩" in page
    assert "x" * 60_000 in page
    assert [int(number) for number in re.findall(r'<article class="[^"]*" id="c(\d+)"', page)] == [1, 2, 3, 4]
    (data,) = re.findall(r'href="data:application/json;base64,([^"]+)" download="verdict', page)
    verdict = tmp_path / "verdict.json"
    verdict.write_bytes(base64.b64decode(data))
    assert run(["verify", str(verdict), "--state", str(state)]) == 0


def test_one_file_of_a_branch_marks_replayed_calls_and_a_run_has_no_branches(
    state: Path, tmp_path: Path
) -> None:
    source = public_id(HANDLES[0])
    with Folder(state) as folder:
        branch = folder.add(
            HANDLES[1],
            labels={"run": "monday"},
            entries=[Call(replayed=True), Call()],
            branch={"episode": source, "at": 1},
        )
        folder.add(HANDLES[0], labels={"run": "monday"})
        folder.add(HANDLES[2], labels={"run": "monday", "replay_of": source})
    page = one_file(state, tmp_path / "episode.html", branch)
    assert "Call 1 was replayed from episode" in re.sub(r"<[^>]*>", "", page)
    assert source in page
    assert ["↻ replayed" in call for call in page.split("<article")[1:]] == [True, False]
    out = tmp_path / "run.jsonl"
    assert export(state, "monday", "--to", "jsonl", "--output", out) == 0
    assert [json.loads(line)["id"] for line in out.read_text("utf-8").splitlines()] == [source]


def test_hostile_texts_do_not_change_the_elements_of_one_file(tmp_path: Path) -> None:
    shapes: set[tuple[str, ...]] = set()
    for name in ("script", "attribute", "closing", "template", "link"):
        text, state = f"{HOSTILE[name]}\n{'y' * 200}", tmp_path / name
        state.mkdir()
        with Folder(state) as folder:
            episode = folder.add(
                HANDLES[0],
                task=text,
                labels={"run": text, "model": text},
                verdict={"evaluator_output": text, "detail": text},
                prompt=text,
                entries=[Call(text, {"a": text}, text), Note(text)],
            )
        shapes.add(tuple(OneFile(one_file(state, state / "episode.html", episode)).elements))
    assert len(shapes) == 1


@pytest.mark.slow
def test_one_file_of_a_long_episode_stays_below_its_limit_and_says_what_is_left_out(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_file_module, "MAX_FILE_BYTES", limit := 3_000_000)
    monkeypatch.setattr(one_file_module, "WHOLE_BYTES", limit // 2)
    with Folder(state) as folder:
        episode = folder.add(HANDLES[0], entries=[Call(reply="<" * 2_500) for _ in range(600)])
    page = one_file(state, tmp_path / "episode.html", episode)
    assert limit / 2 < (tmp_path / "episode.html").stat().st_size <= limit
    assert re.search(r"Left out, since the file would be too long: <[^>]+>Calls 501 to 600<", page)
    OneFile(page)


def test_a_leaderboard_counts_tasks_that_were_not_played_as_no_success(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, *missing = sorted(oracle_ids())
    results: dict[str, list[float | None]] = {first: [1.0, 0.0, 1.0], second: [1.0, None]}
    with Folder(state) as folder:
        for task, rewards in results.items():
            for number, reward in enumerate(rewards):
                folder.add(
                    public_id(f"{task}{number}") * 3,
                    task=task,
                    reward=reward,
                    labels={"run": "monday", "attempt": str(number)},
                    started_at=NOW + number,
                    verdict={"metrics": {"turns": 4 + number}},
                )
        folder.add("f" * 48, task="of another suite", labels={"run": "monday"})
    words = ["runs", "monday", "--leaderboard", "--suite", "starter", "--state", str(state)]
    assert run([*words, "--json"]) == 0
    board = json.loads(capsys.readouterr().out)
    count = len(oracle_ids())
    assert board["tasks"] == count
    assert board["rates"] == [2 / count, 0, 1 / count]
    assert board["pass_1"] == pytest.approx(1 / count)
    assert board["spread"] == pytest.approx(1 / count)
    assert board["pass_at_3"] == 2 / count
    assert board["pass_all_3"] == 0
    assert board["turns"]["mean"] == pytest.approx((4 + 5 + 6 + 4 + 5) / 5)
    assert (board["missing"], board["fewer"], board["lost"]) == (missing, {second: 2}, 1)
    assert board["others"] == ["of another suite"]
    with Folder(state) as folder:
        # The lost attempt, played again.
        labels = {"run": "monday", "attempt": "1"}
        folder.add("e" * 48, task=second, reward=1.0, labels=labels, started_at=NOW + 9)
    assert run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run monday, all tasks: {count} tasks, attempts at each: 3"
    assert lines[1].startswith(f"pass@1 {4 / 3 / count:.3f} ± ")
    assert f"not played, counted as no success: {count - 2}: {', '.join(missing)}" in lines
    assert f"fewer attempts, the missing ones counted as no success: {second} (2)" in lines
    assert not [line for line in lines if line.startswith("lost")]


def test_an_export_that_fails_leaves_nothing(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(state)

    def fail(*_: object) -> Iterator[bytes]:
        yield b"begun"
        raise OSError("the disk is gone")

    monkeypatch.setattr("decathlon_mcp.plugins.exports.export.render_one_file", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        export(state, public_id(HANDLES[0]), "--to", "html", "--output", tmp_path / "episode.html")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
