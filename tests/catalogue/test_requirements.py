"""What a task lacks on a host, and the page that says how to get it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import pytest

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.requirements import (
    DEFAULT_PAGES,
    HostInfo,
    missing_requirements,
)
from decathlon_mcp.errors import SuiteError
from decathlon_mcp.plugins.readiness.suites import (
    parse_missing_programs,
    probe_command,
    read_zone,
)
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.profile import packaged_profiles

if TYPE_CHECKING:
    from decathlon_mcp.catalogue.requirements import MissingRequirement
    from decathlon_mcp.suites.suite import Suite
    from decathlon_mcp.types import Language
    from tests.suites.conftest import Checkout

PROJECT = Path(__file__).parents[2]

ACCOUNTS_PAGE = "global_preparation/how2register_accounts.md"
"""Upstream's page on accounts, which most of these checkouts do not have."""


def missing(
    checkout: Checkout, host: HostInfo | None = None, language: Language = "en"
) -> list[MissingRequirement]:
    suite = checkout.load(language)
    return missing_requirements(suite, suite.tasks["find-paper"], host or HostInfo())


def sentences(checkout: Checkout) -> list[str]:
    suite = checkout.load()
    return Catalogue([suite]).missing_sentences(suite, suite.tasks["find-paper"])


def test_the_bundled_suite_lacks_nothing_without_a_network() -> None:
    suite = load_suite("starter")
    catalogue = Catalogue([suite], host=HostInfo(has_network=False))
    assert all(catalogue.is_runnable(suite, task) for task in suite.tasks.values())


def test_a_requirement_has_a_kind_and_a_page_of_the_checkout_if_it_exists(checkout: Checkout) -> None:
    checkout.server("notion")
    checkout.task(servers=("notion",))
    page = checkout.write(ACCOUNTS_PAGE)
    requirements = missing(checkout)
    assert {(item.kind, item.page) for item in requirements} == {("credential", f"{page}#notion-account")}
    first = requirements[0]
    assert first.name == "notion_integration_key"
    assert first.sentence == f"{first.message} (see {first.page})"
    assert first.to_json() == {
        "kind": "credential",
        "name": "notion_integration_key",
        "said": first.message,
        "page": first.page,
    }


def test_every_page_of_this_project_exists() -> None:
    profiles = [
        page for content in packaged_profiles().values() for page in content.get("pages", {}).values()
    ]
    for page in {*DEFAULT_PAGES.values(), *(page for page in profiles if page.startswith("docs/"))}:
        file, _, anchor = page.partition("#")
        headings = re.findall(r"^#+ (.+)$", (PROJECT / file).read_text("utf-8"), re.MULTILINE)
        slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, page


def test_a_task_without_a_text_in_the_language_cannot_run(checkout: Checkout) -> None:
    checkout.task()
    (requirement,) = missing(checkout, language="cn")
    assert (requirement.kind, requirement.name) == ("text", "docs/task_cn.md")
    checkout.write("tasks/finalpool/find-paper/docs/task_cn.md", "找论文。")
    assert missing(checkout, language="cn") == []


def test_a_task_that_needs_a_network_cannot_run_on_a_host_without_one(checkout: Checkout) -> None:
    checkout.server("fetch")
    checkout.task(servers=("fetch",))
    assert missing(checkout) == []
    (requirement,) = missing(checkout, HostInfo(has_network=False))
    assert (requirement.kind, "--network none" in requirement.message) == ("network", True)


def test_a_private_service_is_missing_until_its_image_is_built_or_the_service_is_hosted(
    checkout: Checkout,
) -> None:
    checkout.server("emails")
    checkout.task(servers=("emails",))
    checkout.write("configs/users_data.json", "{}")
    name = checkout.load().name
    without_image = HostInfo(service_images={name: frozenset()})
    (requirement,) = missing(checkout, without_image)
    assert requirement.sentence == (
        "needs the service poste (ports 2525, 1143, 1587), whose image decathlon-mail:latest is not on the "
        "engine: build its image with images/mail/build, or deploy it as deployment/poste does, then set "
        "`services: {poste: {available: true}}` in suite.yaml (see docs/toolathlon.md#which-tasks-run)"
    )
    assert missing(checkout, HostInfo(service_images={name: frozenset({"decathlon-mail:latest"})})) == []
    assert "the provider of its sandboxes does not run" in missing(checkout)[0].message
    checkout.write("suite.yaml", f"name: {name}\nservices: {{poste: {{available: true}}}}\n")
    assert missing(checkout, without_image) == []


def test_a_token_that_is_not_filled_in_is_missing(checkout: Checkout) -> None:
    checkout.server(
        "github", "params: {command: g, env: {T: '${token.github_token}', R: '${token.github_read_only}'}}"
    )
    checkout.task(servers=("github",))
    checkout.write(
        "configs/token_key_session_example.py",
        "all_token_key_session = Dict(github_token='XX', github_read_only='1')",
    )
    file = checkout.path / "configs/token_key_session.py"
    page = f"{ACCOUNTS_PAGE}#github--huggingface--wandb--serper-accounts"
    assert sentences(checkout) == [
        f"needs github_token, which is not filled in: set it in {file} (see {page})"
    ]
    checkout.write("configs/token_key_session.py", 'all_token_key_session = {"github_token": "ghp_1"}')
    assert sentences(checkout) == [
        f"needs github_read_only, which is not filled in: set it in {file} (see {ACCOUNTS_PAGE})"
    ]


SERVERS: dict[str, tuple[str, Sequence[str]]] = {
    "installed": ("npx", ["-y", "@scope/installed@1.2"]),
    "gone": ("npx", ["-y", "@scope/gone@1.2"]),
    "prefixed": ("npx", ["--prefix", "${local_servers_paths}/..", "-y", "@scope/installed@1.2"]),
    "prefixed-gone": ("npx", ["--prefix", "${local_servers_paths}/..", "-y", "@scope/gone@1.2"]),
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
    "no-path": ("/no/such/program", []),
    "no-script-path": ("python3", ["-u", "/no/such/server.py", "/not/a/script"]),
    "unfilled": ("${config.folder}/program", ["${config.folder}/server.py"]),
}


@pytest.fixture
def probed(checkout: Checkout, tmp_path: Path) -> tuple[Suite, str]:
    """A suite of these servers, and the output of the probe in a root with half of their programs."""
    for name, (command, args) in SERVERS.items():
        checkout.server(name, f"params: {{command: {command}, args: {json.dumps(args)}}}")
    checkout.task("find-paper", servers=("gone", "no-file", "installed"))
    checkout.task("offline", servers=("gone", "installed"))
    checkout.write("suite.yaml", "tasks: {offline: {network: false}}\n")
    root, home, programs = tmp_path / "root", tmp_path / "home", tmp_path / "bin"
    for path in (
        root / "node_modules/@scope/installed/package.json",
        root / "pyproject.toml",
        root / ".venv/lib/python3.12/site-packages/good/__init__.py",
        root / "local_servers/one/main.py",
        home / ".local/share/uv/tools/some-tool/x",
        *(programs / name for name in ("npx", "uvx", "uv", "sh", "python3")),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    suite = checkout.load()
    _, *arguments = probe_command(suite, root=PurePosixPath(root))
    environment = {"PATH": str(programs), "HOME": str(home)}
    process = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=True)
    return suite, process.stdout.decode()


def test_the_probe_finds_missing_programs_without_starting_any(probed: tuple[Suite, str]) -> None:
    suite, output = probed
    root = suite.path.parent / "root"
    assert json.loads(output) == {
        "gone": ["the npm package @scope/gone", True],
        "prefixed-gone": ["the npm package @scope/gone", True],
        "no-tool": ["the Python tool other-tool", True],
        "no-module": ["the Python module bad", True],
        "no-script": [f"the file {root}/local_servers/one/gone.py", False],
        "no-folder": [f"the file {root}/local_servers/two", False],
        "no-file": [f"the file {root}/local_servers/two/main.py", False],
        "no-program": ["the program no-such-program", False],
        "no-path": ["the program /no/such/program", False],
        "no-script-path": ["the file /no/such/server.py", False],
    }


def test_a_downloadable_program_is_missing_only_without_a_network(probed: tuple[Suite, str]) -> None:
    suite, output = probed
    online, offline = suite.tasks["find-paper"], suite.tasks["offline"]
    catalogue = Catalogue([suite])
    assert catalogue.missing_requirements(suite, online) == []
    catalogue.record_missing_programs(suite, parse_missing_programs(suite, output, "the image x"))
    (requirement,) = catalogue.missing_requirements(suite, online)
    assert (requirement.kind, requirement.name) == ("package", "no-file")
    assert requirement.message.endswith(
        "for the MCP server 'no-file', which is missing: looked for in the image x; install it there, or "
        "name another with --image"
    )
    assert [item.name for item in catalogue.missing_requirements(suite, offline)] == ["gone"]


@pytest.mark.parametrize("output", ["{}x", '{"a": "b"}'])
def test_invalid_output_of_the_probe_is_an_error(checkout: Checkout, output: str) -> None:
    checkout.task()
    suite = checkout.load()
    with pytest.raises(SuiteError, match="printed no result"):
        parse_missing_programs(suite, output, "")


@pytest.mark.parametrize(
    ("account", "lacking"),
    [
        (None, []),
        ('{"email": "a@b.test", "password": "x"}', []),
        ('{"email": "a@b.test", "password": ""}', ["password"]),
        ("not JSON", ["email", "password"]),
    ],
)
def test_a_gym_task_whose_mail_account_has_no_password_lacks_it(
    gym: Checkout, account: str | None, lacking: list[str]
) -> None:
    gym.server("emails")
    gym.task(servers=("emails",), files={} if account is None else {"email_config.json": account})
    gym.write("suite.yaml", "services: {postgres: {available: true}}\n")
    requirements = missing(gym)
    assert [item.name for item in requirements] == [f"email_config.json#{key}" for key in lacking]
    file = gym.path / "tasks/finalpool/find-paper/email_config.json"
    for item, key in zip(requirements, lacking, strict=True):
        assert item.kind == "credential"
        assert item.message == f"needs `{key}`, which is not filled in: set it in {file}"
        assert item.page == "docs/gym.md#tasks-without-a-password"


@pytest.mark.parametrize(
    ("output", "zone"),
    [
        ('["Europe/Berlin", ""]', ZoneInfo("Europe/Berlin")),
        ('["", ""]', UTC),
        ('["../../etc/passwd", ""]', None),
        ('["", "VFppZg=="]', None),
    ],
)
def test_zone_of_a_sandbox_is_read_from_what_it_prints(output: str, zone: ZoneInfo | None) -> None:
    assert read_zone(output) == zone
