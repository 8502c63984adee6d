"""`install`: the entry where a program keeps it, and everything else as it was."""

from __future__ import annotations

import io
import json
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.cli.app import run
from decathlon_mcp.cli.install.edit import Text
from decathlon_mcp.cli.install.jsonc import NotJsonError, parse
from decathlon_mcp.cli.install.programs import PROGRAMS, Machine, ProgramName, file_of
from decathlon_mcp.errors import BadRequestError

OLD = """{
    // mine
    "servers": {
        "other": {"command": "npx", "args": ["-y", "thing"]}, // keep me
    },
    "inputs": []
}
"""


@dataclass(frozen=True, slots=True)
class Home:
    """A home of one's own, with the command in it."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def vscode(self) -> Path:
        return self.folder / ".config" / "Code" / "User" / "mcp.json"

    def install(self, *words: str, status: int = 0) -> str:
        """What the command says."""
        self.capsys.readouterr()
        ended = run(["install", *words])
        said = self.capsys.readouterr()
        assert ended == status, said
        return said.err.splitlines()[-1] if status == 1 and said.err else said.out

    def backups(self, of: Path) -> list[Path]:
        return sorted(of.parent.glob(f"{of.name}.before-*"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Home:
    for name in ("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "DECATHLON_URL", "DECATHLON_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.chdir(tmp_path)
    return Home(tmp_path, capsys)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Somebody at a terminal, who says this."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    return lambda said: monkeypatch.setattr(sys, "stdin", Terminal(f"{said}\n"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_new_file_holds_an_entry_that_starts_the_lobby(program: ProgramName, home: Home) -> None:
    home.install(program, "--yes")
    file = file_of(program, Machine(platform="linux"))
    told = json.loads(file.read_text())
    entry = told[PROGRAMS[program].key]["toolathlon"]
    assert Path(entry["command"]).is_absolute()
    assert entry["args"][-1] == "stdio"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    home.install(program, "--undo", "--yes")
    assert not file.exists()
    assert home.backups(file) == []


@pytest.mark.parametrize(
    ("platform", "where"),
    [
        ("darwin", "home/Library/Application Support/Claude/claude_desktop_config.json"),
        ("win32", "roaming/Claude/claude_desktop_config.json"),
        ("linux", "home/.config/Claude/claude_desktop_config.json"),
    ],
)
def test_claude_desktop_keeps_it_where_the_system_says(platform: str, where: str) -> None:
    machine = Machine(platform, Path("home"), {"APPDATA": "roaming"})
    assert file_of("claude-desktop", machine) == Path(where)


def test_other_settings_are_where_their_programs_look() -> None:
    machine = Machine("linux", Path("/h"), {"XDG_CONFIG_HOME": "/x", "CLAUDE_CONFIG_DIR": "/c"})
    assert file_of("vscode", machine) == Path("/x/Code/User/mcp.json")
    assert file_of("cursor", machine) == Path("/h/.cursor/mcp.json")
    assert file_of("claude-code", machine) == Path("/c/.claude.json")
    assert file_of("claude-code", machine, Path("/p")) == Path("/p/.mcp.json")
    assert file_of("vscode", machine, Path("/p")) == Path("/p/.vscode/mcp.json")
    with pytest.raises(BadRequestError, match="no entries of a project"):
        file_of("claude-desktop", machine, Path("/p"))


def test_comments_other_entries_and_layout_survive_both_ways(
    home: Home, answer: Callable[[str], None]
) -> None:
    home.vscode.parent.mkdir(parents=True)
    home.vscode.write_text(OLD)
    home.vscode.chmod(0o640)
    answer("y")
    said = home.install("vscode", "--url", "http://127.0.0.1:8765")
    assert '+        "toolathlon": {' in said
    assert "-" not in {line[:1] for line in said.splitlines()[2:]}
    text = home.vscode.read_text()
    kept, added = text.split('        "toolathlon"')
    assert OLD.startswith(kept)
    assert '"--url",\n                "http://127.0.0.1:8765/mcp"' in added
    assert added.endswith('        },\n    },\n    "inputs": []\n}\n')
    assert stat.S_IMODE(home.vscode.stat().st_mode) == 0o640
    (backup,) = home.backups(home.vscode)
    assert backup.read_text() == OLD
    home.install("vscode", "--undo", "--yes")
    assert home.vscode.read_text() == OLD
    assert home.backups(home.vscode) == []


def test_undo_takes_back_the_entry_alone_where_more_has_changed_since(home: Home) -> None:
    home.vscode.parent.mkdir(parents=True)
    home.vscode.write_text(OLD)
    home.install("vscode", "--yes")
    home.vscode.write_text(home.vscode.read_text().replace("[]", '["later"]'))
    home.install("vscode", "--undo", "--yes")
    assert home.vscode.read_text() == OLD.replace("[]", '["later"]')


def test_undo_after_a_second_writing_gives_the_first_back(home: Home) -> None:
    home.install("cursor", "--task", "tune-reactor", "--yes")
    first = (home.folder / ".cursor" / "mcp.json").read_text()
    assert '"tune-reactor"' in first
    home.install("cursor", "--task", "recount-ballots", "--yes")
    assert "has that entry already" in home.install("cursor", "--task", "recount-ballots")
    home.install("cursor", "--undo", "--yes")
    assert (home.folder / ".cursor" / "mcp.json").read_text() == first
    home.install("cursor", "--undo", "--yes")
    assert "nothing to undo" in home.install("cursor", "--undo", status=1)


def test_nothing_is_written_unless_somebody_agrees(
    home: Home, answer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer("")
    assert "Nothing was written" in run_and_read(home, "cursor")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert "say --yes" in home.install("cursor", status=1)
    assert not (home.folder / ".cursor").exists()


def run_and_read(home: Home, *words: str) -> str:
    assert run(["install", *words]) == 1
    return home.capsys.readouterr().out


def test_print_only_prints(home: Home) -> None:
    told: Any = json.loads(home.install("claude-code", "--print", "--url", "https://host", "--task", "a"))
    assert told["mcpServers"]["toolathlon"]["args"][-3:] == ["stdio", "--url", "https://host/tasks/a/mcp"]
    assert told["mcpServers"]["toolathlon"]["type"] == "stdio"
    assert list(home.folder.iterdir()) == []


def test_a_token_is_written_only_when_asked_for_and_never_shown(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "DECATHLON_TOKEN is not set" in home.install("cursor", "--with-token", status=1)
    monkeypatch.setenv("DECATHLON_TOKEN", "s3cret-s3cret")
    assert "s3cret" not in home.install("cursor", "--url", "http://h", "--with-token", "--yes")
    file = home.folder / ".cursor" / "mcp.json"
    assert json.loads(file.read_text())["mcpServers"]["toolathlon"]["env"] == {
        "DECATHLON_TOKEN": "s3cret-s3cret"
    }
    assert "s3cret" not in home.install("cursor", "--undo", "--yes")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"mcpServers": {,}}', "line 1, column 17: expected a string"),
        ('{\n  "mcpServers": {}\n', "line 3, column 1"),
        ('{"mcpServers": []}', "what 'mcpServers' holds is no object"),
        ("[]", "no object"),
        ('{"a": 1, "a": 2}', "'a' to be there once"),
        ('{"mcpServers": {},}', "no comma behind the last"),
        ("// hello\n{}", "line 1, column 1"),
        ('{"a": 1} }', "expected the end"),
    ],
)
def test_what_is_not_as_it_should_be_is_not_touched(text: str, said: str, home: Home) -> None:
    file = home.folder / ".claude.json"
    file.write_text(text)
    assert said in home.install("claude-code", "--yes", status=1)
    assert file.read_text() == text
    assert home.backups(file) == []


def test_a_link_stays_a_link(home: Home) -> None:
    (home.folder / "dotfiles").mkdir()
    real = home.folder / "dotfiles" / "claude.json"
    real.write_text("{}")
    (home.folder / ".claude.json").symlink_to(real)
    home.install("claude-code", "--yes")
    assert (home.folder / ".claude.json").is_symlink()
    assert "toolathlon" in real.read_text()


def test_a_task_that_there_is_not_is_said_before_anything_is_written(home: Home) -> None:
    said = home.install("cursor", "--task", "tune-reactr", "--yes", status=1)
    assert said.startswith("decathlon-mcp: there is no task 'tune-reactr'; did you mean tune-reactor")
    assert not (home.folder / ".cursor").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{}", '{\n  "k": {\n    "n": 1\n  }\n}'),
        ("", '{\n  "k": {\n    "n": 1\n  }\n}\n'),
        ('{"a": 1}', '{"a": 1, "k": {"n": 1}}'),
        ('{"k": {}}', '{"k": {"n": 1}}'),
        ('{"k": {"m": 0}}', '{"k": {"m": 0, "n": 1}}'),
        ('{"k": {"n": 0, "m": 0}}', '{"k": {"n": 1, "m": 0}}'),
        ('{\n\t"a": 1\n}\n', '{\n\t"a": 1,\n\t"k": {\n\t\t"n": 1\n\t}\n}\n'),
        ('{\r\n "k": {\r\n  "m": 0\r\n }\r\n}', '{\r\n "k": {\r\n  "m": 0,\r\n  "n": 1\r\n }\r\n}'),
        ('{\n  "k": {\n  }\n}', '{\n  "k": {\n    "n": 1\n  }\n}'),
        (
            '{\n  "k": {\n    "m": [], // last\n  },\n}',
            '{\n  "k": {\n    "m": [], // last\n    "n": 1,\n  },\n}',
        ),
        ('{\n  "k": {\n    "m": 0 // last\n  }\n}', '{\n  "k": {\n    "m": 0, // last\n    "n": 1\n  }\n}'),
        ('\ufeff{"k": {"m": "}"}}', '\ufeff{"k": {"m": "}", "n": 1}}'),
    ],
)
def test_a_member_is_put_where_somebody_would_and_taken_out_again(before: str, after: str) -> None:
    text = Text(before, comments=True).with_member(("k", "n"), 1)
    assert text.text == after
    assert text.without_member("k", "n").get("k", "n") is None


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "b": 2, "c": 3}', '{\n "a": 1, // x\n "b": 2,\n /* y */ "c": 3,\n}', '{"c":{},"a":[],"b":""}'],
)
def test_any_member_can_go(text: str, name: str) -> None:
    left = Text(text, comments=True).without_member(name)
    assert sorted(left.value) == sorted({"a", "b", "c"} - {name})


@pytest.mark.parametrize(
    "text", ["", "{", '{"a"}', '{"a": }', "[1 2]", '"\n"', '{"a": 01}', "nul", '{"a": 1,, "b": 2}', "{a: 1}"]
)
def test_what_is_no_json_is_told_by_its_place(text: str) -> None:
    with pytest.raises(NotJsonError, match=r"line \d+, column \d+: expected"):
        parse(text, comments=True)
