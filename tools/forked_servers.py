"""Compares servers of the registries that start by themselves with the same servers as forks (`--preload`).

    python -m tools.forked_servers VENV [VENV ...] [--only NAME] [--write]

Each VENV is a virtual environment of this machine with some of the packages in `SUBJECTS`; a sandbox, which
has no network, sees that one only. For every server that is found, the tools and the replies to three calls
are compared byte for byte: a start by itself, one from which the libraries are learnt, and one as a fork.
Where two starts by themselves differ already, it says so. What is not preloaded is logged with its reason.
In more starts, `tests/preload/servers/process_state.py` says what the process is like when it imports the
server's own package: one that starts by itself and a fork must be the same, and two forks must not draw the
same random numbers. For that, a VENV gets a module that its Python imports, until the comparison is over.
Prints a table; `--write` puts it into docs/results/servers.md, in place of rows of the same servers.

Requires root or user namespaces and bubblewrap, as `--provider host` does.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import anyio
from anyio import to_thread

from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.plugins.conformance.conformance import ROOT
from decathlon_mcp.plugins.preload.forkable_programs import NotPythonError, own_packages, program_of
from decathlon_mcp.plugins.preload.preloads import Kind, Preloads, SetUp
from decathlon_mcp.sandboxes.base import Limits, SandboxSpec
from decathlon_mcp.sandboxes.host.host_files import HostFiles
from decathlon_mcp.sandboxes.host.mounts import HOSTS
from decathlon_mcp.sandboxes.host.namespaces import NamespaceSandbox
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.telemetry.logs import configure_logging
from tests.fakes.calls import call_server
from tests.preload.test_same_state import comparable
from tests.sandboxes.conftest import open_to_everyone

ROOT_FOLDER = Path(__file__).parents[1]
PAGE = ROOT_FOLDER / "docs/results/servers.md"
STATE = ROOT_FOLDER / "tests/preload/servers/process_state.py"
RECORDER = "decathlon_process_state"
ASK, STATE_FILE = "/tmp/decathlon-ask", "/tmp/decathlon-state.json"
"""Files of a sandbox: the first makes a server write the second."""
RECORD = f"""

class Recorder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        import os

        if name in OWN and os.path.exists({ASK!r}):
            os.unlink({ASK!r})
            sys.meta_path.remove(Recorder)
            found = process_state()
            import json, random, ssl, uuid

            found["random"] = [random.getrandbits(64), str(uuid.uuid4()), ssl.RAND_bytes(8).hex()]
            with open({STATE_FILE!r}, "w") as file:
                json.dump(found, file, default=repr)


sys.meta_path.insert(0, Recorder)
"""
LIBRARIES_DO = {"modules", "hooks", "origin"}
"""Parts of a state that imports of libraries change, which come later in a start without a preloader."""
START_SECONDS, CALL_SECONDS, LEARN_SECONDS = 120.0, 12.0, 180.0
CPU = "for p in /proc/[0-9]*; do [ $p = /proc/1 ] || [ $p = /proc/$$ ] || cat $p/task/*/schedstat; done"
"""Prints the CPU time of the threads of all processes but the driver's, in nanoseconds at the beginning."""


@dataclass(frozen=True)
class Subject:
    """A server, and three calls of it."""

    package: str
    arguments: Sequence[str]
    """Of its program, which is the first."""
    calls: Sequence[tuple[str, Mapping[str, Any]]]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


def _file(name: str) -> str:
    return str(ROOT / name)


SUBJECTS = (
    Subject(
        "mcp-server-git",
        ("mcp-server-git", "--repository", _file("repository")),
        (
            ("git_status", {"repo_path": _file("repository")}),
            ("git_create_branch", {"repo_path": _file("repository"), "branch_name": "other"}),
            ("git_status", {"repo_path": "/nowhere"}),
        ),
    ),
    Subject(
        "mcp-server-time",
        ("mcp-server-time",),
        (
            ("convert_time", {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "UTC"}),
            ("get_current_time", {"timezone": "Nowhere"}),
            ("get_current_time", {}),
        ),
    ),
    Subject(
        "mcp-server-fetch",
        ("mcp-server-fetch",),
        (
            ("fetch", {"url": "http://127.0.0.1:9/"}),
            ("fetch", {"url": "nothing"}),
            ("fetch", {}),
        ),
    ),
    Subject(
        "mcp-server-sqlite",
        ("mcp-server-sqlite", "--db-path", _file("test.db")),
        (
            ("create_table", {"query": "CREATE TABLE t (a INTEGER)"}),
            ("write_query", {"query": "INSERT INTO t VALUES (7)"}),
            ("read_query", {"query": "SELECT * FROM t"}),
        ),
    ),
    Subject(
        "mcp-server-calculator",
        ("mcp-server-calculator",),
        (
            ("calculate", {"expression": "2 ** 10 / 3"}),
            ("calculate", {"expression": "1 / 0"}),
            ("calculate", {}),
        ),
    ),
    Subject(
        "cli-mcp-server",
        ("cli-mcp-server",),
        (
            ("run_command", {"command": "pwd"}),
            ("run_command", {"command": "rm x"}),
            ("show_security_rules", {}),
        ),
        {
            "ALLOWED_DIR": str(ROOT),
            "ALLOWED_COMMANDS": "ls,pwd",
            "ALLOWED_FLAGS": "-l",
            "PYTHONHASHSEED": "0",
        },
    ),
    Subject(
        "office-word-mcp-server",
        ("word_mcp_server",),
        (
            ("create_document", {"filename": _file("a.docx"), "title": "A", "author": "B"}),
            ("add_heading", {"filename": _file("a.docx"), "text": "First", "level": 1}),
            ("get_document_text", {"filename": _file("a.docx")}),
        ),
    ),
    Subject(
        "office-powerpoint-mcp-server",
        ("ppt_mcp_server",),
        (
            ("create_presentation", {"id": "a"}),
            ("add_slide", {"layout_index": 1, "title": "First", "presentation_id": "a"}),
            ("get_presentation_info", {"presentation_id": "a"}),
        ),
    ),
    Subject(
        "excel-mcp-server",
        ("excel-mcp-server", "stdio"),
        (
            ("create_workbook", {"filepath": _file("a.xlsx")}),
            ("create_worksheet", {"filepath": _file("a.xlsx"), "sheet_name": "Other"}),
            ("get_workbook_metadata", {"filepath": _file("a.xlsx")}),
        ),
    ),
    Subject(
        "wikipedia-mcp",
        ("wikipedia-mcp",),
        (
            ("search_wikipedia", {"query": "fork"}),
            ("get_summary", {"title": "Fork"}),
            ("get_links", {}),
        ),
    ),
    Subject(
        "duckduckgo-mcp-server",
        ("duckduckgo-mcp-server",),
        (
            ("search", {"query": "fork"}),
            ("fetch_content", {"url": "http://127.0.0.1:9/"}),
            ("search", {}),
        ),
    ),
    Subject(
        "mcp-simple-arxiv",
        ("mcp-simple-arxiv",),
        (
            ("search_papers", {"query": "fork"}),
            ("get_paper_data", {"paper_id": "1"}),
            ("list_categories", {}),
        ),
    ),
    Subject(
        "mcp-simple-pubmed",
        ("mcp-simple-pubmed",),
        (
            ("search_pubmed", {"query": "fork"}),
            ("get_paper_fulltext", {"pmid": "1"}),
            ("search_pubmed", {}),
        ),
        {"PUBMED_EMAIL": "nobody@example.org"},
    ),
    Subject(
        "arxiv-mcp-server",
        ("arxiv-mcp-server", "--storage-path", _file("papers")),
        (
            ("list_papers", {}),
            ("read_paper", {"paper_id": "2001.00001"}),
            ("search_papers", {}),
        ),
    ),
    Subject(
        "markitdown-mcp",
        ("markitdown-mcp",),
        (
            ("convert_to_markdown", {"uri": "data:text/html,<h1>One</h1>"}),
            ("convert_to_markdown", {"uri": "file:///nowhere"}),
            ("convert_to_markdown", {}),
        ),
    ),
    Subject(
        "mcp-yahoo-finance",
        ("mcp-yahoo-finance",),
        (
            ("get_current_stock_price", {"symbol": "A"}),
            ("get_news", {"symbol": "A"}),
            ("get_news", {}),
        ),
    ),
    Subject(
        "yahoo-finance-mcp",
        ("yahoo-finance-mcp",),
        (
            ("get_stock_info", {"ticker": "A"}),
            ("get_yahoo_finance_news", {"ticker": "A"}),
            ("get_stock_info", {}),
        ),
    ),
    Subject(
        "mcp-server-qdrant",
        ("mcp-server-qdrant",),
        (
            ("qdrant-find", {"query": "fork"}),
            ("qdrant-store", {"information": "x"}),
            ("qdrant-find", {}),
        ),
        {"QDRANT_URL": "http://127.0.0.1:9", "COLLECTION_NAME": "a"},
    ),
    Subject(
        "mcp-text-editor",
        ("mcp-text-editor",),
        (
            ("create_text_file", {"file_path": _file("a.txt"), "contents": "one\ntwo\n"}),
            ("get_text_file_contents", {"files": [{"file_path": _file("a.txt"), "ranges": [{"start": 1}]}]}),
            ("delete_text_file_contents", {}),
        ),
    ),
    Subject(
        "mcp-shell-server",
        ("mcp-shell-server",),
        (
            ("shell_execute", {"command": ["ls"], "directory": str(ROOT)}),
            ("shell_execute", {"command": ["rm"], "directory": str(ROOT)}),
            ("shell_execute", {}),
        ),
        {"ALLOW_COMMANDS": "ls,pwd", "PYTHONHASHSEED": "0"},
    ),
    Subject(
        "mcp-server-duckdb",
        ("mcp-server-duckdb", "--db-path", _file("test.duckdb")),
        (
            ("query", {"query": "CREATE TABLE t (a INTEGER)"}),
            ("query", {"query": "INSERT INTO t VALUES (7)"}),
            ("query", {"query": "SELECT * FROM t"}),
        ),
    ),
    Subject(
        "mcp-pandoc",
        ("mcp-pandoc",),
        (
            ("convert-contents", {"contents": "# One", "input_format": "markdown", "output_format": "html"}),
            ("convert-contents", {"contents": "# One", "output_format": "nothing"}),
            ("convert-contents", {}),
        ),
    ),
    Subject(
        "mcp-alchemy",
        ("mcp-alchemy",),
        (
            ("execute_query", {"query": "CREATE TABLE t (a INTEGER)"}),
            ("all_table_names", {}),
            ("schema_definitions", {"table_names": ["t"]}),
        ),
        {"DB_URL": f"sqlite:///{_file('test.db')}"},
    ),
    Subject(
        "redis-mcp-server",
        ("redis-mcp-server", "--url", "redis://127.0.0.1:9/0"),
        (
            ("get", {"key": "a"}),
            ("xrange", {"key": "a", "count": 2}),
            ("get", {}),
        ),
    ),
    Subject(
        "awslabs.aws-documentation-mcp-server",
        ("awslabs.aws-documentation-mcp-server",),
        (
            ("read_documentation", {"url": "https://docs.aws.amazon.com/a.html"}),
            ("read_documentation", {"url": "http://127.0.0.1:9/"}),
            ("recommend", {}),
        ),
    ),
    Subject(
        "mcp-server-tree-sitter",
        ("mcp-server-tree-sitter",),
        (
            ("get_node_types", {"language": "python"}),
            ("list_files", {"project": "nothing"}),
            ("analyze_complexity", {}),
        ),
    ),
    Subject(
        "sequential-thinking-mcp",
        ("sequential-thinking-mcp",),
        (
            (
                "think",
                {"thread_purpose": "a", "thought": "b", "thought_index": 1, "tool_recommendation": "c"},
            ),
            ("think", {"thread_purpose": "a"}),
            ("think", {}),
        ),
    ),
    Subject(
        "mysql-mcp-server",
        ("mysql_mcp_server",),
        (
            ("execute_sql", {"query": "SELECT 1"}),
            ("get_schema_info", {"table_name": "t"}),
            ("execute_sql", {}),
        ),
        {
            "MYSQL_HOST": "127.0.0.1",
            "MYSQL_PORT": "9",
            "MYSQL_USER": "a",
            "MYSQL_PASSWORD": "b",
            "MYSQL_DATABASE": "c",
        },
    ),
    Subject(
        "mcp-obsidian",
        ("mcp-obsidian",),
        (
            ("obsidian_delete_file", {"filepath": "a.md"}),
            ("obsidian_search_by_tag", {"tag": "x"}),
            ("obsidian_search_by_tag", {}),
        ),
        {"OBSIDIAN_API_KEY": "a", "OBSIDIAN_HOST": "127.0.0.1", "OBSIDIAN_PORT": "9"},
    ),
)


class Learnt(Preloads):
    """Knows one server, without episodes. `set_up`: in which it is learnt; `cold`: why it was no fork."""

    def __init__(self, state: Path, files: HostFiles) -> None:
        super().__init__(state)
        self._files = files
        self.kind: Kind | None = None
        self.why_not: str | None = None
        self.set_up: SetUp | None = None
        self.cold: list[str] = []

    def serve(self, spec: dict[str, Any]) -> None:
        try:
            self.kind, self.why_not = Kind(program_of(spec, self._files), self._files, None), None
            self.kinds[spec["name"]] = self.kind
        except NotPythonError as error:
            self.kind, self.why_not = None, str(error)

    async def kind_of(self, sandbox: NamespaceSandbox, server: str) -> tuple[Kind, SetUp | None]:
        if self.kind is None:
            raise NotPythonError(self.why_not or "it is not preloaded")
        return self.kind, self.set_up

    def note(self, server: str, reason: str) -> None:
        self.cold.append(reason)


@dataclass(frozen=True)
class Answers:
    """What a server that was started replied and was like."""

    replies: list[bytes]
    seconds: float
    """CPU time until it had listed its tools."""
    state: dict[str, Any]
    """Empty if it was not asked for."""


@asynccontextmanager
async def machine(venv: Path) -> AsyncGenerator[tuple[HostProvider, Learnt]]:
    """Sandboxes that see a virtual environment, and what makes their servers forks."""
    files = await to_thread.run_sync(lambda: HostFiles.for_program((), [venv], (), HOSTS))
    with open_to_everyone() as folder, patch.object(HostFiles, "of_this_server", return_value=files):
        async with HostProvider(f"forks-{secrets.token_hex(4)}", folder / "sandboxes") as provider:
            learnt = Learnt(folder, files)
            provider.connect(learnt.channel, learnt.run)
            await anyio.wait_all_tasks_blocked()
            yield provider, learnt


@asynccontextmanager
async def sandbox(provider: HostProvider) -> AsyncGenerator[DriverClient]:
    name = f"forks-{secrets.token_hex(4)}"
    spec = SandboxSpec(name, BOOT_COMMAND, ROOT, None, "none", Limits(memory_mib=2048, pids=200))
    async with provider.open(spec) as opened, connect(opened) as driver:
        yield driver


async def start(
    provider: HostProvider, spec: dict[str, Any], subject: Subject, *, says_state: bool = False
) -> Answers:
    """Start the server and call it. Raises DecathlonError."""
    async with sandbox(provider) as driver:
        if says_state:
            await driver.run(["touch", ASK], cwd="/", timeout_seconds=30)
        prepare = ["git", "init", "-q", "--initial-branch", "main", _file("repository")]
        await driver.run(prepare, cwd=str(ROOT), timeout_seconds=30)
        await driver.define([spec])
        info = await driver.start([spec["name"]], deadline_seconds=START_SECONDS)
        times = await driver.run(["sh", "-c", CPU], cwd="/", timeout_seconds=30)
        seconds = sum(int(line.split()[0]) for line in times.stdout.splitlines() if line.split()) / 1e9
        replies = [json.dumps(info[spec["name"]].tools).encode()]
        for tool, arguments in subject.calls:
            replies.append(b"no reply")
            with anyio.move_on_after(CALL_SECONDS):
                reply = await call_server(driver, spec["name"], {"name": tool, "arguments": arguments})
                replies[-1] = bytes(reply.result or json.dumps(reply.error).encode())
        text = "{}"
        if says_state:
            text = (await driver.run(["cat", STATE_FILE], cwd="/", timeout_seconds=30)).stdout
        return Answers(replies, seconds, json.loads(text))


async def learn(provider: HostProvider, learnt: Learnt, spec: dict[str, Any], subject: Subject) -> Answers:
    """Start the server so that its libraries become known, and wait until they are imported."""
    learnt.set_up = SetUp()
    try:
        answers = await start(provider, spec, subject)
        learnt.set_up.succeeded = True
    finally:
        learnt.set_up.ended.set()
        learnt.set_up = None
    kind = learnt.kind
    if kind is not None:
        with anyio.fail_after(LEARN_SECONDS):
            while kind.process is None and kind.why_cold is None and kind.is_learning:
                await kind.changed.wait()
    return answers


def differences(one: Answers, other: Answers) -> str:
    """Which replies differ; nothing if none does."""
    pairs = zip(one.replies, other.replies, strict=True)
    names = ("tools/list", "1st call", "2nd call", "3rd call")
    return ", ".join(name for name, (a, b) in zip(names, pairs, strict=True) if a != b)


def state_differences(cold: Answers, forks: Sequence[Answers]) -> str:
    """Which parts of the states differ, and whether forks draw the same numbers; nothing if all is right."""
    one, other = (answers.state for answers in forks)
    found = [
        key
        for key in cold.state
        if key not in {*LIBRARIES_DO, "random"} and comparable(cold.state[key]) != comparable(one[key])
    ]
    found += ["random numbers" for a, b in zip(one["random"], other["random"], strict=True) if a == b]
    return ", ".join(found)


@contextmanager
def recorder(venv: Path, program: str) -> Generator[None]:
    """Let the servers of a virtual environment say what their processes are like."""
    (packages,) = (venv / "lib").glob("python*/site-packages")
    own = [name for name in own_packages(Path(program)) if name not in sys.stdlib_module_names]
    module, hook = packages / f"{RECORDER}.py", packages / f"{RECORDER}.pth"
    module.write_text(f"{STATE.read_text()}\nOWN = {own!r}\n{RECORD}")
    hook.write_text(f"import {RECORDER}\n")
    try:
        yield
    finally:
        module.unlink()
        hook.unlink()


async def compare(venv: Path, version: str, subject: Subject) -> str:
    """A row of the table."""
    program = str(venv / "bin" / subject.arguments[0])
    spec: dict[str, Any] = {
        "name": "server",
        "command": program,
        "args": list(subject.arguments[1:]),
        "env": dict(subject.env),
        "inherit": "minimal",
        "cwd": str(ROOT),
        "request_seconds": 60.0,
    }
    with recorder(venv, program):
        async with machine(venv) as (provider, learnt):
            learnt.why_not = "not asked for"
            cold = await start(provider, spec, subject)
            again = await start(provider, spec, subject)
            stated = await start(provider, spec, subject, says_state=True)
            learnt.serve(spec)
            learning = await learn(provider, learnt, spec, subject)
            learnt.cold.clear()
            fork = await start(provider, spec, subject)
            forks = [await start(provider, spec, subject, says_state=True) for _ in range(2)]
        own = differences(cold, again)
        if learnt.cold:
            started, cpu = f"by itself: {' '.join(learnt.cold[0].split())}", ""
        else:
            started, cpu = "as a fork", f"{fork.seconds:.2f}"
        found = differences(cold, fork) or differences(cold, learning)
        same = "yes" if not found else f"{found}; without `--preload` too: {own or 'no'}"
        if found:
            for one in (cold, fork):
                sys.stderr.write(b"\n".join(reply[:2000] for reply in one.replies).decode() + "\n\n")
        state = state_differences(stated, forks)
        if state:
            for key in state.split(", "):
                sys.stderr.write(f"{key}: {stated.state.get(key)}\n{forks[0].state.get(key)}\n")
        mean = (cold.seconds + again.seconds) / 2
        columns = (subject.package, version, started, same, state or "yes", f"{mean:.2f}", cpu)
        return f"| {' | '.join(columns)} |"


def versions(venv: Path) -> dict[str, str]:
    code = "import importlib.metadata as m, json\n"
    code += "print(json.dumps({d.name: d.version for d in m.distributions()}))"
    result = subprocess.run([venv / "bin/python", "-c", code], capture_output=True, check=True)
    return {name.lower().replace("_", "-"): version for name, version in json.loads(result.stdout).items()}


def write(rows: Sequence[str]) -> None:
    """Put rows into the page's table, in place of those of the same servers."""
    before, begin, rest = PAGE.read_text().partition("| ---")
    dashes, _, rest = rest.partition("\n")
    table, gap, after = rest.partition("\n\n")
    lines = {line.split("|")[1].strip(): line for line in (*table.splitlines(), *rows) if line.strip()}
    content = "\n".join(lines[name] for name in sorted(lines))
    PAGE.write_text(f"{before}{begin}{dashes}\n{content}{gap}{after}")


async def main(venvs: Sequence[Path], only: Sequence[str], writes: bool) -> None:
    rows: list[str] = []
    for venv in venvs:
        installed = versions(venv)
        for subject in SUBJECTS:
            if subject.package not in installed or (only and subject.package not in only):
                continue
            try:
                rows.append(await compare(venv, installed[subject.package], subject))
            except (DecathlonError, TimeoutError) as error:
                sys.stderr.write(f"{subject.package}: {error} {getattr(error, 'data', '')}\n")
                continue
            sys.stdout.write(rows[-1] + "\n")
            sys.stdout.flush()
            if writes:
                write(rows)


if __name__ == "__main__":
    configure_logging()
    parser = argparse.ArgumentParser(description="Compare servers that start by themselves and as forks.")
    parser.add_argument("venvs", nargs="+", type=lambda text: Path(text).absolute())
    parser.add_argument("--only", action="append", default=cast("list[str]", []))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    anyio.run(main, given.venvs, given.only, given.write)
