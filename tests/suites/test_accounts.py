"""Accounts: the tasks that share one, their slots, and the credentials of each; ports of services."""

from __future__ import annotations

import io
import tarfile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.errors import SuiteError

if TYPE_CHECKING:
    from decathlon_mcp.suites.suite import Suite
    from tests.suites.conftest import Checkout

NOTION_SERVER = "params: {command: n, env: {K: '${token.notion_integration_key}'}}\n"


def keys(suite: Suite) -> dict[str, set[str]]:
    return {name: {resource.key for resource in suite.shared_resources(name)} for name in suite.tasks}


def contents(archive: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert all(member.mode == 0o600 for member in tar)
        files = {member.name: tar.extractfile(member) for member in tar}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_tasks_whose_servers_use_one_account_share_it(checkout: Checkout) -> None:
    for name in ("github", "google_sheet", "google_forms", "filesystem"):
        checkout.server(name)
    checkout.task("repo", servers=("github", "filesystem"))
    checkout.task("repo-and-sheet", servers=("google_sheet", "github"))
    checkout.task("forms", servers=("google_forms",))
    checkout.task("offline", servers=("filesystem",))
    shared = keys(checkout.load())
    assert shared["repo-and-sheet"] == shared["repo"] | shared["forms"]
    assert not shared["repo"] & shared["forms"]
    assert shared["offline"] == set()


def test_a_token_distinguishes_accounts_of_one_kind(checkout: Checkout) -> None:
    checkout.server("woocommerce")
    site = "from addict import Dict\nall_token_key_session = Dict(woocommerce_site_url={})\n"
    for task, url in (("a", "'http://one'"), ("b", "'http://two'"), ("c", "'http://one'"), ("d", "read()")):
        own = {"token_key_session.py": site.format(url)}
        checkout.task(task, servers=("woocommerce",), files=own)
    checkout.task("e", servers=("woocommerce",))
    assert not any(keys(checkout.load()).values()), "each episode has its own shops"
    checkout.write("suite.yaml", "services: {woocommerce: {available: true}}\n")
    shared = keys(checkout.load())
    assert shared["a"] == shared["c"]
    assert len({frozenset(shared[name]) for name in "abde"}) == 4, "a computed value is the task's own"
    assert all(shared.values()), "no task runs twice at the same time"


def test_suite_yaml_overrides_accounts_and_slots(checkout: Checkout) -> None:
    checkout.server("github")
    checkout.server("wandb")
    checkout.task("one", servers=("github",))
    checkout.task("two", servers=("wandb",))
    checkout.write(
        "suite.yaml", "accounts: {wandb: {servers: []}, github: {slots: 3}, mine: {tasks: [two]}}\n"
    )
    suite = checkout.load()
    (github,) = suite.shared_resources("one")
    (mine,) = suite.shared_resources("two")
    assert (github.account, github.slots) == ("github", ("1", "2", "3"))
    assert (mine.account, mine.slots) == ("mine", ("",))


def test_credentials_of_a_slot_override_the_checkouts_own(checkout: Checkout) -> None:
    checkout.server("notion", NOTION_SERVER)
    checkout.task(servers=("notion",))
    checkout.write("configs/token_key_session_example.py", "all_token_key_session = Dict(other='XX')\n")
    checkout.write("secrets/b.json", '{"b": 1}')
    checkout.write("secrets/folder/deep/c.json", "c")
    checkout.write(
        "suite.yaml",
        """\
        servers:
          notion: {credentials: [token.notion_integration_key, configs/notion_state.json]}
        accounts:
          notion:
            slots:
              first:
                values: {token.notion_integration_key: "o'ne"}
                files: {configs/notion_state.json: secrets/b.json, /root/.notion: secrets/folder}
              second:
                values: {token.notion_integration_key: two}
                files: {configs/notion_state.json: secrets/b.json}
        """,
    )
    suite = checkout.load()
    task = suite.tasks["find-paper"]
    (shared,) = suite.shared_resources(task.id)
    assert shared.slots == ("first", "second")
    missing = " ".join(Catalogue([suite]).missing_sentences(suite, task))
    assert "notion_integration_key, " not in missing, "every slot provides it"
    assert "notion_state" not in missing
    (first_folder, relative), (second_folder, absolute) = suite.resources.credential_archives(
        task, {"notion": "first"}
    )
    assert (first_folder, second_folder) == (PurePosixPath(), PurePosixPath("/"))
    files = contents(relative)
    assert files["configs/notion_state.json"] == '{"b": 1}'
    assert contents(absolute) == {"root/.notion/deep/c.json": "c"}
    values: dict[str, object] = {"Dict": dict}
    exec(files["configs/token_key_session.py"], values)
    assert values["all_token_key_session"] == {"other": "XX", "notion_integration_key": "o'ne"}
    (_, second), *rest = suite.resources.credential_archives(task, {"notion": "second"})
    assert "'two'" in contents(second)["configs/token_key_session.py"]
    assert rest == []


def test_credential_files_of_a_server_are_packed_and_required(checkout: Checkout) -> None:
    checkout.write(
        "suite.yaml", "profile: starter\nservers: {mail: {files: {/root/.mail/key.json: secrets/key.json}}}\n"
    )
    checkout.server("mail")
    checkout.server("other")
    checkout.task("with", servers=("mail",))
    checkout.task("without", servers=("other",))
    suite = checkout.load()
    task = suite.tasks["with"]
    (sentence,) = Catalogue([suite]).missing_sentences(suite, task)
    assert sentence.startswith(f"needs the file {checkout.path}/secrets/key.json (copied to /root/.mail/")
    with pytest.raises(SuiteError, match="cannot be read"):
        suite.resources.credential_archives(task, {})
    checkout.write("secrets/key.json", "{}")
    assert Catalogue([suite]).is_runnable(suite, task)
    assert suite.resources.credential_archives(suite.tasks["without"], {}) == []


@pytest.mark.parametrize("target", ["workspace/key", "/episode/workspace/a/key"])
def test_credential_files_in_the_workspace_are_refused(checkout: Checkout, target: str) -> None:
    checkout.task()
    checkout.write("suite.yaml", f"profile: starter\nservers: {{mail: {{files: {{{target}: a}}}}}}\n")
    with pytest.raises(SuiteError, match="in the agent's workspace"):
        checkout.load()


@pytest.mark.parametrize("target", ["/tmp/x", "a/../../b"])
def test_invalid_targets_of_credential_files_are_refused(checkout: Checkout, target: str) -> None:
    checkout.task()
    checkout.write("suite.yaml", f"servers: {{mail: {{files: {{{target}: a}}}}}}\n")
    with pytest.raises(SuiteError, match=r"servers\.mail\.files"):
        checkout.load()


@pytest.mark.parametrize(
    ("ports", "targets"),
    [
        ("[80]", {80: ("localhost", 80)}),
        ("{80: 8080}", {80: ("localhost", 8080)}),
        ("{80: '[::1]:81'}", {80: ("::1", 81)}),
    ],
)
def test_ports_of_a_service_are_mapped_to_addresses(
    checkout: Checkout, ports: str, targets: dict[int, tuple[str, int]]
) -> None:
    checkout.write("suite.yaml", f"profile: starter\nservices: {{shop: {{ports: {ports}}}}}\n")
    checkout.task()
    assert checkout.load().resources.service("shop").targets == targets


@pytest.mark.parametrize("ports", ["[0]", "{80: 'shop:x'}"])
def test_an_invalid_port_is_an_error(checkout: Checkout, ports: str) -> None:
    checkout.write("suite.yaml", f"profile: starter\nservices: {{shop: {{ports: {ports}}}}}\n")
    checkout.task()
    with pytest.raises(SuiteError, match=r"services\.shop\.ports"):
        checkout.load()
