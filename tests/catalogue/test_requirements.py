"""What keeps a task from running, of what kind it is, and the page that says how to get it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.host import HostInfo
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.profile import packaged
from decathlon_mcp.suites.programs import read_absent
from decathlon_mcp.suites.requirements import PAGES

if TYPE_CHECKING:
    from decathlon_mcp.suites.requirements import MissingRequirement
    from decathlon_mcp.suites.suite import Suite
    from tests.suites.conftest import Checkout

PROJECT = Path(__file__).parents[2]


def lacks(checkout: Checkout, here: HostInfo | None = None) -> list[MissingRequirement]:
    suite = load_suite(checkout.path, here)
    return suite.lacks(suite.tasks["find-paper"])


def test_a_lack_says_its_kind_and_a_page_of_the_checkout_where_it_is_there(checkout: Checkout) -> None:
    checkout.server("notion")
    checkout.task(servers=("notion",))
    page = checkout.write("global_preparation/how2register_accounts.md")
    found = lacks(checkout)
    assert {(lack.kind, lack.page) for lack in found} == {("credential", f"{page}#notion-account")}
    assert found[0].name == "notion_integration_key"
    assert found[0].sentence == f"{found[0].said} (see {found[0].page})"


def test_a_suites_own_pages_outweigh_the_profiles(checkout: Checkout) -> None:
    checkout.server("github")
    checkout.server("emails")
    checkout.task(servers=("github", "emails"))
    checkout.write(
        "suite.yaml", "pages: {token.github_token: 'https://x.test/keys', 'service.*': docs/x.md}\n"
    )
    assert [lack.page for lack in lacks(checkout)] == ["https://x.test/keys", "docs/x.md"]


def test_a_task_without_a_text_in_the_language_cannot_run(checkout: Checkout) -> None:
    checkout.task()
    (lack,) = lacks(checkout, HostInfo("cn"))
    assert (lack.kind, lack.name) == ("text", "docs/task_cn.md")
    checkout.write("tasks/finalpool/find-paper/docs/task_cn.md", "找论文。")
    assert lacks(checkout, HostInfo("cn")) == []


def test_a_task_that_needs_a_network_cannot_run_where_none_has_one(checkout: Checkout) -> None:
    checkout.server("fetch")
    checkout.task(servers=("fetch",))
    assert lacks(checkout) == []
    (lack,) = lacks(checkout, HostInfo(has_network=False))
    assert (lack.kind, "--network none" in lack.said) == ("network", True)


def test_every_page_of_ours_is_there() -> None:
    said = [page for words in packaged().values() for page in words.get("pages", {}).values()]
    for page in {*PAGES.values(), *(page for page in said if page.startswith("docs/"))}:
        file, _, anchor = page.partition("#")
        headings = re.findall(r"^#+ (.+)$", (PROJECT / file).read_text("utf-8"), re.MULTILINE)
        slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, page


SERVERS: dict[str, tuple[str, list[str]]] = {
    "there": ("npx", ["-y", "@scope/there@1.2"]),
    "gone": ("npx", ["-y", "@scope/gone@1.2"]),
    "tool": ("uvx", ["--from", "Some_Tool", "serve"]),
    "no-tool": ("uvx", ["other-tool"]),
    "module": ("uv", ["run", "-m", "good.part"]),
    "no-module": ("uv", ["run", "-m", "bad"]),
    "script": ("uv", ["--directory", "${local_servers_paths}/one", "run", "main.py"]),
    "no-script": ("uv", ["--directory", "${local_servers_paths}/one", "run", "gone.py"]),
    "no-folder": ("uv", ["--directory", "${local_servers_paths}/two", "run", "main.py"]),
    "file": ("sh", ["${local_servers_paths}/one/main.py", "${agent_workspace}/later"]),
    "no-file": ("sh", ["${local_servers_paths}/two/main.py"]),
    "no-program": ("no-such-program", []),
    "unknown": ("sh", ["-c", "whatever"]),
}


@pytest.fixture
def looked(checkout: Checkout, tmp_path: Path) -> tuple[Suite, str]:
    """A suite of these servers, and what the look says of a tree that has half of what they want."""
    for name, (command, args) in SERVERS.items():
        checkout.server(name, f"params: {{command: {command}, args: {json.dumps(args)}}}")
    checkout.task("find-paper", servers=("gone", "no-file", "there"))
    checkout.task("offline", servers=("gone", "there"))
    checkout.write("suite.yaml", "tasks: {offline: {network: false}}\n")
    root, home, tools = tmp_path / "root", tmp_path / "home", tmp_path / "bin"
    for path in (
        root / "node_modules/@scope/there/package.json",
        root / "pyproject.toml",
        root / ".venv/lib/python3.12/site-packages/good/__init__.py",
        root / "local_servers/one/main.py",
        home / ".local/share/uv/tools/some-tool/x",
        *(tools / name for name in ("npx", "uvx", "uv", "sh")),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    suite = checkout.load()
    _, *arguments = suite.probe(root=PurePosixPath(root))
    environment = {"PATH": str(tools), "HOME": str(home)}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=True)
    return suite, done.stdout.decode()


def test_programs_that_are_not_there_are_found_without_starting_any(looked: tuple[Suite, str]) -> None:
    root = looked[0].path.parent / "root"
    assert json.loads(looked[1]) == {
        "gone": ["the npm package @scope/gone", True],
        "no-tool": ["the Python tool other-tool", True],
        "no-module": ["the Python module bad", True],
        "no-script": [f"the file {root}/local_servers/one/gone.py", False],
        "no-folder": [f"the file {root}/local_servers/two", False],
        "no-file": [f"the file {root}/local_servers/two/main.py", False],
        "no-program": ["the program no-such-program", False],
    }


def test_what_can_be_fetched_is_no_lack_where_there_is_a_network(looked: tuple[Suite, str]) -> None:
    suite, printed = looked
    assert suite.lacks(suite.tasks["find-paper"]) == []
    suite.here.learn(read_absent(printed, "looked for in the image x"))
    (lack,) = suite.lacks(suite.tasks["find-paper"])
    assert (lack.kind, lack.name) == ("package", "no-file")
    assert lack.said.endswith("for the MCP server 'no-file', which is not there: looked for in the image x")
    assert [lack.name for lack in suite.lacks(suite.tasks["offline"])] == ["gone"]


@pytest.mark.parametrize("printed", ["", "{}x", '{"a": "b"}', "[]"])
def test_an_answer_of_another_kind_is_an_error(printed: str) -> None:
    with pytest.raises(SuiteError, match="gave no answer"):
        read_absent(printed, "")
