"""Reading state folders: runs, episodes and their trajectories."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator
from contextlib import closing
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from decathlon_mcp.catalogue.pass_rates import PassRate
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.curriculum import live_rates
from decathlon_mcp.plugins.history import queries, reports
from decathlon_mcp.plugins.history.entries import JSON_BYTES
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import (
    FAILURES_FIRST,
    CallEntry,
    EpisodeQuery,
    Estimate,
    NoteEntry,
    Order,
    Page,
)
from decathlon_mcp.storage.store import Store
from decathlon_mcp.storage.trajectory import Trajectory
from decathlon_mcp.types import as_json_with_raw, public_id
from tests.history.stored_episodes import LIVE, LOST, add_episode, add_run


def names(page: Page[Any]) -> list[str]:
    return [item.public_id for item in page.items]


def test_success_decides_and_not_a_full_reward(tmp_path: Path) -> None:
    labels = {"run": "r"}
    add_episode(tmp_path, "one", reward=0.7, success=True, labels=labels)
    add_episode(tmp_path, "two", reward=1.0, success=False, labels=labels)
    report = EpisodeHistory([tmp_path]).run("r")
    assert report is not None
    assert report.summary.counts.successes == 1
    assert report.summary.mean_reward == pytest.approx(0.85)


def test_replays_and_branches_are_in_no_numbers_and_in_lists_if_asked_for(tmp_path: Path) -> None:
    one = add_episode(tmp_path, "one", labels={"run": "r"})
    add_episode(tmp_path, "two", labels={"run": "r", "replay_of": one})
    add_episode(tmp_path, "three", labels={"run": "r"}, branch={"episode": one, "at": 1})
    history = EpisodeHistory([tmp_path])
    report = history.run("r")
    assert report is not None
    assert report.summary.counts.episodes == 1
    assert names(history.episodes(EpisodeQuery(run="r"))) == [one]
    assert len(history.episodes(EpisodeQuery(run="r", with_branches=True)).items) == 3


def test_episodes_are_found_by_run_label_task_result_time_phase_and_owner(tmp_path: Path) -> None:
    a = add_episode(tmp_path, "a", labels={"run": "r", "model": "x"}, started_at=1.0, token="alice")
    b = add_episode(tmp_path, "b", labels={"run": "r", "model": "y"}, started_at=2.0, reward=0.0)
    c = add_episode(tmp_path, "c", task="other", suite="t", started_at=3.0, reward=LOST)
    d = add_episode(tmp_path, "d", started_at=4.0, reward=LIVE)
    history = EpisodeHistory([tmp_path])
    for query, expected in (
        (EpisodeQuery(), [d, c, b, a]),
        (EpisodeQuery(run="r"), [b, a]),
        (EpisodeQuery(labels={"model": "x"}), [a]),
        (EpisodeQuery(labels={"model": "x", "run": "other"}), []),
        (EpisodeQuery(labels={"it's": 'a "name"'}), []),
        (EpisodeQuery(task="other"), [c]),
        (EpisodeQuery(suite="s", failed=True), [b]),
        (EpisodeQuery(failed=True), [c, b]),
        (EpisodeQuery(failed=False), [d, a]),
        (EpisodeQuery(live=True), [d]),
        (EpisodeQuery(live=False), [c, b, a]),
        (EpisodeQuery(lost=True), [c]),
        (EpisodeQuery(lost=False), [d, b, a]),
        (EpisodeQuery(owner="alice"), [a]),
        (EpisodeQuery(order=FAILURES_FIRST), [c, b, d, a]),
        (EpisodeQuery(order=Order("result", descending=False)), [a, d, b, c]),
        (EpisodeQuery(order=Order("started", descending=False)), [a, b, c, d]),
        (EpisodeQuery(order=Order("task", descending=False)), [c, a, b, d]),
        (EpisodeQuery(order=Order("run")), [b, a, d, c]),
    ):
        assert names(history.episodes(query)) == expected, query


def test_pages_of_several_folders_have_each_episode_once(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    rewards = [1.0, 0.0, LOST, LIVE]
    for number in range(24):
        # Some start at the same time.
        add_episode(
            folders[number % 2],
            f"{number}",
            started_at=float(number // 4),
            reward=rewards[number // 3 % 4],
            labels={"run": f"run-{number % 5}"} if number % 3 else {},
        )
    history = EpisodeHistory([*folders, tmp_path / "none"])
    columns: tuple[Any, ...] = ("started", "result", "task", "run", "calls", "took")
    for column, descending in product(columns, (True, False)):
        order = Order(column, descending)
        whole = names(history.episodes(EpisodeQuery(order=order)))
        paged: list[str] = []
        cursor = None
        while True:
            page = history.episodes(EpisodeQuery(order=order), limit=5, cursor=cursor)
            paged += names(page)
            if (cursor := page.cursor) is None:
                break
        assert paged == whole
        assert len(set(paged)) == 24


def test_attempts_that_nobody_claimed_and_that_have_no_run_are_stray(tmp_path: Path) -> None:
    left = add_episode(tmp_path, "left", reward=LOST)
    of_a_run = add_episode(tmp_path, "of a run", reward=LOST, labels={"run": "r"})
    failed = add_episode(tmp_path, "failed", reward=0.0)
    live = add_episode(tmp_path, "live", reward=LIVE)
    claimed = add_episode(tmp_path, "claimed", reward=LOST)
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection, connection:
        # As servers leave them: the first was closed by a client that left.
        for name, by_agent in ((left, False), (claimed, True)):
            connection.execute(
                "UPDATE episodes SET verdict = NULL, progress = ? WHERE public_id = ?",
                (json.dumps({"claim": {"by_agent": by_agent}}), name),
            )
    history = EpisodeHistory([tmp_path])
    assert names(history.episodes(EpisodeQuery(stray=True))) == [left]
    assert set(names(history.episodes(EpisodeQuery(stray=False)))) == {of_a_run, failed, live, claimed}


@pytest.mark.parametrize("cursor", ["", "0.y.z", "\ud800"])
def test_a_cursor_that_is_none_is_a_bad_request(tmp_path: Path, cursor: str) -> None:
    add_episode(tmp_path, "one", labels={"run": "r"})
    history = EpisodeHistory([tmp_path])
    with pytest.raises(BadRequestError):
        history.episodes(EpisodeQuery(), cursor=cursor)
    with pytest.raises(BadRequestError):
        history.runs(cursor=cursor)


def test_an_owner_sees_the_numbers_of_its_own_episodes(tmp_path: Path) -> None:
    add_episode(tmp_path, "one", token="alice", labels={"run": "r"})
    add_episode(tmp_path, "two", token="bob", reward=0.0, labels={"run": "r"})
    history = EpisodeHistory([tmp_path])
    report = history.run("r", owner="alice")
    assert report is not None
    assert report.summary.counts.episodes == 1
    assert history.run("r", owner="eve") is None
    assert history.runs(owner="eve").items == ()
    assert history.runs(owner="bob").items[0].counts.successes == 0


def test_the_curve_is_by_step_if_there_are_steps_and_else_by_time(tmp_path: Path) -> None:
    for step, reward in (("10", 1.0), ("9", 0.5), ("9", LOST), ("x", 1.0)):
        add_episode(
            tmp_path, f"{step}-{reward}", reward=reward, success=False, labels={"run": "r", "step": step}
        )
    add_episode(tmp_path, "early", started_at=100.0, labels={"run": "t"})
    add_episode(tmp_path, "late", started_at=5_100.0, reward=0.0, labels={"run": "t"})
    history = EpisodeHistory([tmp_path])
    by_step, by_time = history.run("r"), history.run("t")
    assert by_step is not None
    assert by_time is not None
    assert by_step.curve_by == "step"
    assert [(point.at, point.reward and point.reward.mean) for point in by_step.curve] == [
        (9.0, 0.5),
        (10.0, 1.0),
    ]
    assert by_step.curve[0].success == Estimate(0.0, 0.0, 2)
    assert by_time.curve_by == "time"
    assert [(point.at, point.highest) for point in by_time.curve] == [(100.0, 1.0), (5_100.0, 0.0)]


def write_calls(trajectory: Trajectory, first: int, last: int, *, reply: str = '{"content":[]}') -> None:
    for seq in range(first, last + 1):
        trajectory.add(
            "call",
            server="files",
            tool="read",
            request=seq,
            seq=seq,
            name="files__read",
            arguments={"path": f"file-{seq}"},
            digest="0",
            started_at=1.0,
        )
        trajectory.add(
            "reply", seq=seq, failed=seq % 3 == 0, seconds=0.25, result=msgspec.Raw(reply.encode())
        )


class Writers:
    """Episodes with a trajectory, which is closed at the end of the test."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._open: list[Trajectory] = []

    def open(self, name: str = "one") -> tuple[Trajectory, str]:
        episode = add_episode(self._state, name)
        return self.keep(Trajectory(self._state / "episodes" / name).create()), episode

    def keep(self, trajectory: Trajectory) -> Trajectory:
        self._open.append(trajectory)
        return trajectory

    def close(self) -> None:
        for trajectory in self._open:
            trajectory.close()


@pytest.fixture
def writers(tmp_path: Path) -> Generator[Writers]:
    writers = Writers(tmp_path)
    yield writers
    writers.close()


def test_calls_and_notes_are_read_in_order_by_their_numbers(tmp_path: Path, writers: Writers) -> None:
    trajectory, episode = writers.open()
    tools = b'[{"name":"files__read"}]'
    digest = sha256(tools).hexdigest()
    trajectory.add("start", version=1, suite="s", task="task", labels={"run": "r"})
    trajectory.add("ready", prompt={"system": None, "task": "Do it."}, tools=digest)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / f"{digest}.json").write_bytes(tools)
    trajectory.add("note", calls=0, role="assistant", text="First I look.", usage={"input_tokens": 7})
    write_calls(trajectory, 1, 2)
    trajectory.add("note", calls=2, role="reasoning", text='Quotes " and \n lines')
    write_calls(trajectory, 3, 3)
    trajectory.add("note", calls=3, role="assistant", text="Done.")
    trajectory.add("claim", by_agent=True, answer="42")
    history = EpisodeHistory([tmp_path])
    entries = history.calls(episode, 1, 100)
    assert [entry.text.raw if isinstance(entry, NoteEntry) else entry.seq for entry in entries] == [
        "First I look.",
        1,
        2,
        'Quotes " and \n lines',
        3,
        "Done.",
    ]
    assert entries[0] == history.calls(episode, 1, 1)[0]
    assert [type(entry) for entry in history.calls(episode, 3, 3)] == [NoteEntry, CallEntry, NoteEntry]
    call = entries[1]
    assert isinstance(call, CallEntry)
    assert call.arguments is not None
    assert call.reply is not None
    assert (call.name, call.server, call.tool, call.failed, call.seconds) == (
        "files__read",
        "files",
        "read",
        False,
        0.25,
    )
    assert json.loads(call.arguments.raw) == {"path": "file-1"}
    assert (call.reply.raw, call.reply_kind) == ('{"content":[]}', "result")
    note = entries[0]
    assert isinstance(note, NoteEntry)
    assert (note.usage, note.role) == ({"input_tokens": 7}, "assistant")
    details = history.episode(episode)
    assert details is not None
    assert (details.calls, details.notes) == (3, 3)
    assert details.head is not None
    assert details.head["labels"] == {"run": "r"}
    assert details.system_prompt is None
    assert details.task_prompt is not None
    assert details.task_prompt.raw == "Do it."
    assert details.claim is not None
    assert details.claim["answer"] == "42"
    assert details.verdict is not None
    assert history.tools(episode) == tools
    assert [call_time.failed for call_time in history.call_times(episode)] == [False, False, True]


def test_a_call_without_a_reply_and_one_that_was_never_sent_are_shown(
    tmp_path: Path, writers: Writers
) -> None:
    trajectory, episode = writers.open()
    trajectory.add("accepted", seq=1, name="files__read", arguments=None, digest="0", started_at=1.0)
    trajectory.add(
        "reply", seq=1, failed=True, seconds=1.0, failure={"code": "episode_ended", "message": "over"}
    )
    trajectory.add("call", server="files", tool="read", request=2, seq=2, name="files__read", arguments={})
    first, second = EpisodeHistory([tmp_path]).calls(episode, 1, 2)
    assert isinstance(first, CallEntry)
    assert isinstance(second, CallEntry)
    assert (first.server, first.arguments, first.reply_kind, first.failed) == (None, None, "failure", True)
    assert (second.server, second.reply, second.seconds) == ("files", None, None)


def test_long_values_are_slices_that_nobody_parses(tmp_path: Path, writers: Writers) -> None:
    trajectory, episode = writers.open()
    deep = "[" * 1_000_000 + "]" * 1_000_000
    trajectory.add("ready", prompt={"system": "s", "task": "é" * JSON_BYTES}, tools="0" * 64)
    trajectory.add(
        "call",
        server="files",
        tool="read",
        request=1,
        seq=1,
        name="n",
        arguments={"text": "x" * JSON_BYTES},
        digest="0",
    )
    trajectory.add("reply", seq=1, failed=False, seconds=0.1, result=msgspec.Raw(deep.encode()))
    # Longer than a server keeps.
    note = {"event": "note", "time": 1.0, "calls": 1, "role": "assistant", "text": "é" * JSON_BYTES}
    with trajectory.file.open("ab") as file:
        file.write(as_json_with_raw(note) + b"\n")
    history = EpisodeHistory([tmp_path])
    call, note = history.calls(episode, 1, 1)
    assert isinstance(call, CallEntry)
    assert isinstance(note, NoteEntry)
    assert call.reply is not None
    assert call.arguments is not None
    assert (call.reply.truncated, call.reply.size_bytes, len(call.reply.raw)) == (True, 2_000_000, JSON_BYTES)
    assert call.arguments.truncated
    assert note.text.truncated
    assert note.text.raw.startswith('"éé')
    details = history.episode(episode)
    assert details is not None
    assert details.ready is None
    assert details.task_prompt is not None
    assert details.task_prompt.truncated
    reply = history.raw_reply(episode, 1)
    assert reply is not None
    assert b"".join(reply) == deep.encode()
    assert history.raw_reply(episode, 2) is None


@pytest.mark.parametrize("text", ['a "quoted" name', "Ünïcode", "C:\\path"])
def test_texts_are_found_however_json_writes_them(tmp_path: Path, writers: Writers, text: str) -> None:
    trajectory, episode = writers.open()
    write_calls(trajectory, 1, 2, reply='{"content":[{"type":"text","text":"nothing"}]}')
    inner = json.dumps({"text": text.lower()}, ensure_ascii=False)
    for seq, reply in enumerate(
        (
            json.dumps({"content": [{"type": "text", "text": f"before {text} after"}]}),
            json.dumps({"content": [{"type": "text", "text": text}]}, ensure_ascii=False),
            json.dumps({"content": [{"type": "text", "text": inner}]}, ensure_ascii=False),
        ),
        3,
    ):
        trajectory.add("call", server="s", tool="t", request=seq, seq=seq, name="other", arguments=None)
        trajectory.add("reply", seq=seq, failed=False, seconds=0.1, result=msgspec.Raw(reply.encode()))
    history = EpisodeHistory([tmp_path])
    found = [history.find(episode, text, after=after) for after in (2, 3, 4, 5)]
    assert found == [3, 4, 5 if text != "Ünïcode" else None, None]


def test_search_covers_names_and_arguments_and_finds_the_next_error(tmp_path: Path, writers: Writers) -> None:
    trajectory, episode = writers.open()
    write_calls(trajectory, 1, 7)
    history = EpisodeHistory([tmp_path])
    results = [
        history.find(episode, "READ"),
        history.find(episode, "file-5"),
        history.find(episode, "", failed_only=True),
        history.find(episode, "", failed_only=True, after=3),
        history.find(episode, "", failed_only=True, after=6),
    ]
    assert results == [1, 5, 3, 6, None]
    with pytest.raises(BadRequestError, match="1000 characters"):
        history.find(episode, "x" * 1_001)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"event":"call","seq":99999999999999,"name":"x"}',
        b'{"event":"note","calls":-5,"role":"x","text":5}',
        b'{"event":"reply","seq":1,"failed":true,"seconds":NaN,"error":"\\ud800"}',
    ],
)
def test_damaged_lines_hide_no_others(tmp_path: Path, writers: Writers, line: bytes) -> None:
    trajectory, episode = writers.open()
    write_calls(trajectory, 1, 1)
    with (trajectory.folder / "trajectory.jsonl").open("ab") as file:
        file.write(line + b"\n")
    trajectory = writers.keep(Trajectory(trajectory.folder).reopen())
    write_calls(trajectory, 2, 2)
    history = EpisodeHistory([tmp_path])
    entries = history.calls(episode, 1, 10)
    assert [entry.seq for entry in entries if isinstance(entry, CallEntry)] == [1, 2]
    assert [time.seconds for time in history.call_times(episode)] == [0.25, 0.25]


@pytest.mark.parametrize("name", ["", "../one", "0" * 16])
def test_an_id_that_is_no_episodes_is_none(tmp_path: Path, writers: Writers, name: str) -> None:
    writers.open()
    history = EpisodeHistory([tmp_path])
    assert history.episode(name) is None
    assert history.calls(name, 1, 1) == []
    assert history.tools(name) is None
    assert history.raw_reply(name, 1) is None


def test_lists_and_numbers_use_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_run(tmp_path, "r", {"a": [1.0]})
    add_episode(tmp_path, "branch", branch={"episode": public_id("r-a-0"), "at": 1})
    statements: list[str] = []
    for module, name in (
        *product([reports], ("run_times", "task_sums", "lost_reasons", "has_steps", "curve")),
        *product([queries], ("episodes", "find", "summary", "branches", "branch_counts")),
    ):
        whole = getattr(module, name)

        def traced(connection: sqlite3.Connection, *args: Any, whole: Any = whole) -> Any:
            connection.set_trace_callback(statements.append)
            return whole(connection, *args)

        monkeypatch.setattr(module, name, traced)
    history = EpisodeHistory([tmp_path])
    history.runs()
    history.run("r")
    for query in (
        EpisodeQuery(),
        EpisodeQuery(run="r"),
        EpisodeQuery(task="a"),
        EpisodeQuery(run="r", order=FAILURES_FIRST),
        EpisodeQuery(order=Order("started", descending=False)),
        EpisodeQuery(lost=True),
        EpisodeQuery(branch_of=public_id("r-a-0"), with_branches=True),
        EpisodeQuery(owner="ann"),
        EpisodeQuery(owner="ann", task="a", suite="s", order=FAILURES_FIRST),
        EpisodeQuery(owner="ann", run="r", failed=True, stray=False),
        EpisodeQuery(owner="ann", lost=True),
    ):
        history.episodes(query)
    history.episode(public_id("r-a-0"))
    for owner in (None, "ann"):
        history.tree(public_id("r-a-0"), owner=owner)
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        for statement in {text for text in statements if text.startswith("SELECT")}:
            plan = [str(row[3]) for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")]
            assert any("INDEX" in step for step in plan), (statement, plan)
            assert "SCAN episodes" not in plan, (statement, plan)
            if "token = 'ann'" in statement:
                # Not by what other tokens' episodes have as well.
                used = " ".join(plan)
                assert any(key in used for key in ("(token=?", "(public_id=?", "branches_by_")), plan
            if "GROUP BY branch_of" in statement or " ORDER BY reward" in statement:
                assert any("INDEX branches_by_" in step for step in plan), (statement, plan)
                assert not any("TEMP B-TREE" in step for step in plan), (statement, plan)
            elif "GROUP BY" in statement:
                assert any("COVERING INDEX episodes_in_numbers" in step for step in plan), (statement, plan)
            if " ORDER BY started_at" in statement:
                assert "USE TEMP B-TREE FOR ORDER BY" not in plan, (statement, plan)


@pytest.mark.parametrize("conditions", [{}, {"run": "r", "token": "ann"}])
def test_pass_rates_of_now_need_no_look_at_other_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conditions: dict[str, str]
) -> None:
    """On the event loop: those of a token with few episodes took a minute behind 200,000 of another."""
    add_episode(tmp_path, "own", token="ann", labels={"run": "r"})
    with Store.open(tmp_path, "server") as store:
        plans: list[str] = []
        query = store.query

        def explained(statement: str, *values: Any) -> list[tuple[Any, ...]]:
            plans.extend(str(row[3]) for row in query(f"EXPLAIN QUERY PLAN {statement}", *values))
            return query(statement, *values)

        monkeypatch.setattr(store, "query", explained)
        rates = live_rates(store)(conditions.get("run"), None, conditions.get("token"))
    assert rates.of("s", "task") == PassRate(1, 1)
    terms = "".join(f" AND {name}=?" for name in sorted(conditions, reverse=True)).removeprefix(" AND ")
    (plan,) = [plan for plan in plans if "episodes" in plan]
    assert "COVERING INDEX graded" in plan
    assert plan.endswith(f"({terms})" if terms else "graded")
