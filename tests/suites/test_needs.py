"""What a task needs, and what of it is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from decathlon_mcp.suites.suite import Suite
    from tests.suites.conftest import Checkout

TOKENS = """\
from addict import Dict
import os
all_token_key_session = Dict(
    timezone = "Asia/Hong_Kong",
    github_token = os.environ.get("KLAVIS_GITHUB_TOKEN", "XX"), # TO BE FILLED
    github_allowed_repos = "null",
    github_read_only = "1",
    wandb_api_key = "w-123",
    google_client_id = google_credentials.get("client_id", ""),
    nothing = None,
)
"""

PAGE = "global_preparation/how2register_accounts.md"
"""Of upstream's, where it says how to get accounts; not there in these checkouts."""


def the_missing(suite: Suite) -> list[str]:
    return suite.missing(suite.tasks["find-paper"])


def test_the_internet_is_needed_by_servers_that_reach_out(checkout: Checkout) -> None:
    for name in ("filesystem", "excel", "fetch", "somebodys_own"):
        checkout.server(name)
    checkout.task("offline", servers=("filesystem", "excel"), local_tools=("claim_done", "python_execute"))
    checkout.task("online", servers=("filesystem", "fetch"))
    checkout.task("unknown", servers=("somebodys_own",))
    checkout.task("searching", local_tools=("web_search",))
    tasks = checkout.load().tasks
    assert {name: task.needs.network for name, task in tasks.items()} == {
        "offline": False,
        "online": True,
        "unknown": True,
        "searching": True,
    }


@pytest.mark.parametrize(
    ("url", "network"),
    [
        ("https://mcp.example.org/mcp", True),
        ("http://localhost:8000/mcp", False),
        ("http://${token.h}/mcp", True),
    ],
)
def test_a_server_of_an_unlisted_kind_needs_the_network_if_its_address_does(
    checkout: Checkout, url: str, network: bool
) -> None:
    checkout.write("suite.yaml", "profile: starter\n")
    checkout.server("remote", f"type: sse\nparams: {{url: '{url}'}}\n")
    checkout.task(servers=("remote",))
    assert checkout.load().tasks["find-paper"].needs.network is network


def test_hosted_services_are_named_with_their_ports_and_a_cure(checkout: Checkout) -> None:
    checkout.server("emails")
    checkout.task(servers=("emails",))
    suite = checkout.load()
    assert suite.tasks["find-paper"].needs.services == ("poste",)
    assert not suite.tasks["find-paper"].needs.network, "its ports are led into the sandbox"
    (sentence,) = the_missing(suite)
    assert sentence == (
        "needs the service poste (ports 10005, 2525, 1143, 1587), which is not said to be there: deploy it "
        "as deployment/poste does, then say `services: {poste: {available: true}}` in suite.yaml "
        "(see docs/toolathlon.md#which-tasks-run)"
    )
    checkout.write("suite.yaml", "services: {poste: {available: true}}\n")
    assert the_missing(checkout.load()) == []


def test_a_token_that_nobody_has_filled_in_is_missing(checkout: Checkout) -> None:
    checkout.server(
        "github", "params: {command: g, env: {T: '${token.github_token}', R: '${token.github_read_only}'}}"
    )
    checkout.task(servers=("github",))
    checkout.write("configs/token_key_session_example.py", TOKENS)
    suite = checkout.load()
    assert suite.tasks["find-paper"].needs.credentials == ("token.github_token",)
    file = checkout.path / "configs/token_key_session.py"
    page = f"{PAGE}#github--huggingface--wandb--serper-accounts"
    assert the_missing(suite) == [
        f"needs github_token, which nobody has filled in: set it in {file} (see {page})"
    ]
    checkout.write("configs/token_key_session.py", 'all_token_key_session = {"github_token": "ghp_1"}')
    suite = checkout.load()
    assert suite.tasks["find-paper"].needs.credentials == ("token.github_token", "token.github_read_only")
    assert the_missing(suite) == [
        f"needs github_read_only, which nobody has filled in: set it in {file} (see {PAGE})"
    ]


def test_a_tasks_own_token_file_fills_in(checkout: Checkout) -> None:
    checkout.server("sheet", "params: {command: g, env: {F: '${token.folder}', G: '${token.other}'}}")
    own = 'folder_id = open("id").read()\nall_token_key_session = Dict(folder=folder_id, other="XX")\n'
    checkout.task(servers=("sheet",), files={"token_key_session.py": own})
    assert checkout.load().tasks["find-paper"].needs.credentials == ("token.other",)


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("timezone", True),
        ("wandb_api_key", True),
        ("google_client_id", True),
        ("nothing", False),
        ("absent", False),
    ],
)
def test_constants_computed_values_and_nothing_are_told_apart(
    checkout: Checkout, name: str, there: bool
) -> None:
    checkout.server("any", f"params: {{command: x, args: ['${{token.{name}}}']}}")
    checkout.task(servers=("any",))
    checkout.write("configs/token_key_session.py", TOKENS)
    assert (checkout.load().tasks["find-paper"].needs.credentials == ()) is there


@pytest.mark.parametrize("text", ["def (", "all_token_key_session = _NullTokens()", "other = Dict(a=1)"])
def test_a_token_file_of_another_form_fills_in_nothing(checkout: Checkout, text: str) -> None:
    checkout.server("any", "params: {command: x, args: ['${token.a}']}")
    checkout.task(servers=("any",))
    checkout.write("configs/token_key_session.py", text)
    assert checkout.load().tasks["find-paper"].needs.credentials == ("token.a",)


def test_a_credential_that_is_a_file_is_looked_for(checkout: Checkout) -> None:
    checkout.server("google_forms")
    checkout.task(servers=("google_forms",))
    suite = checkout.load()
    path = checkout.path / "configs/google_credentials.json"
    said = f"needs the file configs/google_credentials.json, which is not there: put it at {path}"
    assert the_missing(suite) == [f"{said} (see {PAGE}#google-account)"]
    checkout.write("configs/google_credentials.json", "{}")
    assert the_missing(suite) == []


def test_the_gym_needs_its_database_but_for_five_tasks(gym: Checkout) -> None:
    gym.server("canvas")
    gym.task("howtocook-nutrition-ppt")
    gym.task("canvas-report", servers=("canvas",))
    suite = gym.load()
    assert suite.missing(suite.tasks["howtocook-nutrition-ppt"]) == []
    assert not suite.tasks["howtocook-nutrition-ppt"].needs.network
    assert suite.tasks["canvas-report"].needs.services == ("postgres",)


def test_clusters_are_graded_on_the_agents_own_machine(checkout: Checkout) -> None:
    checkout.task("k8s-mysql")
    checkout.task("imagenet")
    tasks = checkout.load().tasks
    assert (tasks["k8s-mysql"].in_place, tasks["imagenet"].in_place) == (True, False)
