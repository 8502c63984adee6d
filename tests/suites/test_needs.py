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


def test_a_tasks_own_token_file_provides_values(checkout: Checkout) -> None:
    checkout.server("sheet", "params: {command: g, env: {F: '${token.folder}', G: '${token.other}'}}")
    own = 'folder_id = open("id").read()\nall_token_key_session = Dict(folder=folder_id, other="XX")\n'
    checkout.task(servers=("sheet",), files={"token_key_session.py": own})
    assert checkout.load().tasks["find-paper"].needs.credentials == ("token.other",)


@pytest.mark.parametrize(
    ("name", "is_filled_in"),
    [
        ("timezone", True),
        ("google_client_id", True),
        ("nothing", False),
    ],
)
def test_constants_and_computed_values_are_filled_in(
    checkout: Checkout, name: str, is_filled_in: bool
) -> None:
    checkout.server("any", f"params: {{command: x, args: ['${{token.{name}}}']}}")
    checkout.task(servers=("any",))
    checkout.write("configs/token_key_session.py", TOKENS)
    assert (checkout.load().tasks["find-paper"].needs.credentials == ()) is is_filled_in


@pytest.mark.parametrize("text", ["def (", "all_token_key_session = _NullTokens()"])
def test_a_token_file_of_another_form_provides_nothing(checkout: Checkout, text: str) -> None:
    checkout.server("any", "params: {command: x, args: ['${token.a}']}")
    checkout.task(servers=("any",))
    checkout.write("configs/token_key_session.py", text)
    assert checkout.load().tasks["find-paper"].needs.credentials == ("token.a",)
