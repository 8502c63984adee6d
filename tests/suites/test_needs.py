"""What a task needs: a network, services, credentials."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
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


def test_a_task_needs_a_network_if_one_of_its_servers_does(checkout: Checkout) -> None:
    for name in ("filesystem", "excel", "fetch", "my_own"):
        checkout.server(name)
    checkout.task("offline", servers=("filesystem", "excel"), local_tools=("claim_done", "python_execute"))
    checkout.task("online", servers=("filesystem", "fetch"))
    checkout.task("unknown", servers=("my_own",))
    checkout.task("searching", local_tools=("web_search",))
    tasks = checkout.load().tasks
    assert {name: task.needs.network for name, task in tasks.items()} == {
        "offline": False,
        "online": True,
        "unknown": True,
        "searching": True,
    }


def test_hosted_services_need_no_network(checkout: Checkout) -> None:
    checkout.server("emails")
    checkout.task(servers=("emails",))
    needs = checkout.load().tasks["find-paper"].needs
    assert needs.services == ("poste",)
    assert not needs.network, "its ports are forwarded into the sandbox"


def test_a_credential_that_a_task_can_do_without_is_not_needed(checkout: Checkout) -> None:
    checkout.task("meeting-assign", local_tools=("claim_done", "web_search"))
    checkout.task("find-paper", local_tools=("claim_done", "web_search"))
    tasks = checkout.load().tasks
    assert tasks["find-paper"].needs.credentials == ("token.serper_api_key",)
    assert (tasks["meeting-assign"].needs.credentials, tasks["meeting-assign"].needs.network) == ((), False)


def test_a_tasks_own_token_file_provides_values(checkout: Checkout) -> None:
    checkout.server("sheet", "params: {command: g, env: {F: '${token.folder}', G: '${token.other}'}}")
    own = 'folder_id = open("id").read()\nall_token_key_session = Dict(folder=folder_id, other="XX")\n'
    checkout.task(servers=("sheet",), files={"token_key_session.py": own})
    assert checkout.load().tasks["find-paper"].needs.credentials == ("token.other",)


@pytest.mark.parametrize(
    ("name", "is_filled_in"),
    [
        ("timezone", True),
        ("wandb_api_key", True),
        ("google_client_id", True),
        ("nothing", False),
        ("absent", False),
    ],
)
def test_constants_and_computed_values_are_filled_in(
    checkout: Checkout, name: str, is_filled_in: bool
) -> None:
    checkout.server("any", f"params: {{command: x, args: ['${{token.{name}}}']}}")
    checkout.task(servers=("any",))
    checkout.write("configs/token_key_session.py", TOKENS)
    assert (checkout.load().tasks["find-paper"].needs.credentials == ()) is is_filled_in


@pytest.mark.parametrize("text", ["def (", "all_token_key_session = _NullTokens()", "other = Dict(a=1)"])
def test_a_token_file_of_another_form_provides_nothing(checkout: Checkout, text: str) -> None:
    checkout.server("any", "params: {command: x, args: ['${token.a}']}")
    checkout.task(servers=("any",))
    checkout.write("configs/token_key_session.py", text)
    assert checkout.load().tasks["find-paper"].needs.credentials == ("token.a",)


def test_the_gyms_tasks_need_its_database_except_for_five(gym: Checkout) -> None:
    gym.server("canvas")
    gym.task("howtocook-nutrition-ppt")
    gym.task("canvas-report", servers=("canvas",))
    suite = gym.load()
    assert suite.tasks["howtocook-nutrition-ppt"].needs.services == ()
    assert not suite.tasks["howtocook-nutrition-ppt"].needs.network
    assert suite.tasks["canvas-report"].needs.services == ("postgres",)


def test_cluster_tasks_are_graded_in_place(checkout: Checkout) -> None:
    checkout.task("k8s-mysql")
    checkout.task("imagenet")
    tasks = checkout.load().tasks
    assert (tasks["k8s-mysql"].in_place, tasks["imagenet"].in_place) == (True, False)


def test_a_server_that_upstream_lists_without_having_it_is_left_out(checkout: Checkout) -> None:
    checkout.server("excel")
    checkout.task(servers=("excel", "web_search"))
    assert checkout.load().tasks["find-paper"].needs.servers == ("excel",)
    checkout.server("web_search")
    assert checkout.load().tasks["find-paper"].needs.servers == ("excel", "web_search")
