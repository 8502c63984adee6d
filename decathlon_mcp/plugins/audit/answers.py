"""Answers of a task that no agent must see: the ground truth, and the constants of its evaluator."""

from __future__ import annotations

import ast
import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task

WINDOW = 32
"""Characters of a ground truth that nobody finds by chance."""
MIN_VARIETY = 10
"""Different characters of such a part."""
PARTS_OF_A_FILE = 24
MAX_FILES, MAX_BYTES = 400, 4 << 20
"""Files of a folder that are read, and what is read of each."""
MIN_CONSTANT = 16
QUOTED = 60
"""Characters of an answer that a finding quotes."""
_FILE_NAME = re.compile(r"[\w\-]{1,60}(?:/[\w\-]{1,60}){0,3}\.[A-Za-z0-9]{1,5}")
_PROGRAMS = "--exclude-dir=.venv --exclude-dir=site-packages --exclude-dir=node_modules"
"""Folders of installed programs, which are not searched."""
_DIGESTS = ("md5", "sha1", "sha256")
_WORDLESS = re.compile(r"[A-Za-z_.:%/-]+")
_OUTPUT_SUFFIXES = frozenset(
    {
        *("json", "jsonl", "csv", "tsv", "txt", "md", "yaml", "yml", "xml", "html", "tex", "bib"),
        *("xlsx", "xls", "docx", "pptx", "pdf", "png", "svg", "db", "sqlite", "zip", "tar"),
        *("py", "sh", "js", "ts"),
    }
)


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one task, as far as its checkout has them.

    `parts`: texts that no agent can know, each with where it stands. `outputs`: names of the files that the
    evaluator probably reads. `files`: the ground truth's files, by their names.
    """

    parts: dict[str, str]
    outputs: tuple[str, ...]
    files: dict[str, Path]
    workspace: tuple[str, ...]
    """Names of the files that an agent finds."""
    shared: frozenset[str] = frozenset()
    """Parts that are also in the source of the suite's own servers: a reply may show them."""

    @property
    def searched(self) -> list[str]:
        """The parts that no file of a sandbox should have."""
        return [part for part in self.parts if part not in self.shared]

    def seen_in(self, text: str, request: str = "") -> str | None:
        """Which answer a reply contains, and where it stands; None if it contains none.

        `request`: what the audit has sent itself, of which the reply may be an echo.
        """
        for part, where in self.parts.items():
            if part in text and part not in request:
                return f"{where}: {part[:QUOTED]!r}"
        return None


def read_answers(suite: Suite, task: Task, prompt: str) -> Answers:
    """Read a task's answers from its checkout. Blocks."""
    folder = suite.path / task.folder
    given = dict(_files(folder / task.files.initial_workspace)) if task.files.initial_workspace else {}
    truth = dict(_files(folder / task.files.groundtruth)) if task.files.groundtruth else {}
    public = "\n".join((prompt, *(_told_by(path) for path in given.values())))
    # An evaluator shares texts with this code that are no answers.
    servers = suite.profile.local_servers
    names_of_code = tuple(str(name) for name in suite.profile.common if str(name) != str(servers))
    common, tools = _texts_of(suite.path, names_of_code), _texts_of(suite.path, (str(servers),))
    parts: dict[str, str] = {}
    for name, path in truth.items():
        found = (part for part in _windows(_text(path)) if part not in public)
        parts |= dict.fromkeys(islice(found, PARTS_OF_A_FILE), f"the ground truth's {name}")
    names: list[str] = [*truth]
    evaluation = folder / task.files.evaluation.rpartition(".")[0].replace(".", "/")
    for name, path in _files(evaluation):
        if not name.endswith(".py"):
            continue
        for constant in _constants(_text(path)):
            names += _FILE_NAME.findall(constant)
            if _is_telling(constant) and constant not in public and constant not in common:
                parts[constant] = f"a constant of the evaluator's {name}"
    names += [
        name for name in _FILE_NAME.findall(prompt) if name.rpartition(".")[2].lower() in _OUTPUT_SUFFIXES
    ]
    wanted = {name for name in names if name.rpartition(".")[2].lower() in _OUTPUT_SUFFIXES}
    outputs = sorted(name for name in wanted if name not in given and not name.startswith("/"))
    shared = frozenset(part for part in parts if part in tools)
    return Answers(parts, tuple(outputs[:40]), truth, tuple(given), shared)


def _is_telling(constant: str) -> bool:
    """Whether nobody writes a text by chance: it is long enough, and no name or format."""
    is_long = len(constant) >= MIN_CONSTANT and len(set(constant)) >= MIN_VARIETY
    return is_long and _WORDLESS.fullmatch(constant) is None


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files below a folder, by their path in it; nothing if there is no such folder. Blocks."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    for path in islice(found, MAX_FILES):
        if "__pycache__" not in path.parts:
            yield str(path.relative_to(folder)), path


def _content(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(MAX_BYTES)
    except OSError:
        return b""


def _text(path: Path) -> str:
    return _content(path).decode("utf-8", "replace")


@cache
def _texts_of(suite: Path, names: tuple[str, ...]) -> str:
    """The texts of these files and folders of a suite, which are the same for all of its tasks. Blocks."""
    return "\n".join(_text(path) for name in names for _, path in _files(suite / name))


def _told_by(path: Path) -> str:
    """What a file tells an agent: its text, and the digests that a tool may show of it."""
    content = _content(path)
    digests = (hashlib.new(name, content, usedforsecurity=False).hexdigest() for name in _DIGESTS)
    return "\n".join((content.decode("utf-8", "replace"), *digests))


def _windows(text: str) -> Iterator[str]:
    """Parts of a text's lines that nobody finds by chance, spread over the whole text."""
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) >= WINDOW]
    step = max(1, len(lines) // (4 * PARTS_OF_A_FILE))
    for line in lines[::step]:
        middle = (len(line) - WINDOW) // 2
        for start in {0, middle, len(line) - WINDOW}:
            part = line[start : start + WINDOW]
            if len(set(part)) >= MIN_VARIETY and part.isprintable() and "\ufffd" not in part:
                yield part


def _constants(source: str) -> Iterator[str]:
    """The texts of a Python program that are no documentation and no part of a message."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    others = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    others |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others:
            yield node.value


def search_command(parts: Iterable[str], task: Task) -> str:
    """A command of a shell that prints which files of a sandbox contain one of the texts, and their names.

    It does not contain the texts itself: a tool may write the command into a file.
    """
    # `grep` takes a line for a text, and an empty one is in each file.
    lines = base64.b64encode("\n".join(part for part in parts if "\n" not in part).encode()).decode()
    places = '"$ROOT" "$HOME" /tmp /var/tmp /dev/shm /opt /srv /root /mnt'
    contents = (
        f"echo {lines} | base64 -d | timeout 60 grep -rlaF {_PROGRAMS} -f - {places} 2>/dev/null | head -20; "
        if lines
        else ""
    )
    hidden = r"\( -path '*groundtruth*' -o -path '*/evaluation/*' \)"
    return f"{contents}find {places} -path '*{task.id}*' {hidden} 2>/dev/null | head -20"
