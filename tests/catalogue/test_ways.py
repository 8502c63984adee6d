"""How a task can run: ready, with a recording, with a private service, or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from decathlon_mcp.catalogue.requirements import HostInfo, broken_file, missing_requirements
from decathlon_mcp.plugins.readiness.list_tasks import WayToRun, count_ways, way_to_run
from decathlon_mcp.suites.documents import file_error

if TYPE_CHECKING:
    from tests.suites.conftest import Checkout

UNFILLED = "all_token_key_session = dict(serper_api_key='XX', github_token='XX')\n"
FILLED = "all_token_key_session = dict(serper_api_key='key', github_token='key')\n"
OFFLINE = HostInfo(has_network=False)


def way(checkout: Checkout, host: HostInfo | None = None) -> WayToRun:
    suite = checkout.load()
    task = suite.tasks["find-paper"]
    return way_to_run(suite, task, missing_requirements(suite, task, host or HostInfo()))


@pytest.mark.parametrize(
    ("servers", "local_tools", "name", "text"),
    [
        (("excel",), (), "ready", "ready"),
        (("fetch",), (), "with a recording", "with a recording"),
        (
            ("fetch",),
            ("web_search",),
            "with a recording",
            "with a recording (serper_api_key to record it)",
        ),
        (("emails",), (), "with a private service", "with private mail"),
        (("canvas", "emails"), (), "with a private service", "with a private Canvas and private mail"),
        (("woocommerce", "github"), (), "cannot run", "cannot run: github_token"),
        (("k8s", "emails"), (), "cannot run", "cannot run: the service k8s"),
        (
            ("snowflake",),
            (),
            "cannot run",
            "cannot run: snowflake_account, snowflake_user, configs/snowflake_rsa_key.p8",
        ),
    ],
)
def test_the_way_follows_from_what_the_task_needs(
    checkout: Checkout, servers: tuple[str, ...], local_tools: tuple[str, ...], name: str, text: str
) -> None:
    for server in servers:
        checkout.server(server)
    checkout.write("configs/token_key_session.py", UNFILLED)
    checkout.task(servers=servers, local_tools=local_tools)
    found = way(checkout)
    assert (found.name, found.text) == (name, text)
    # A recording takes the place of the network, so that it makes no difference that there is none.
    assert way(checkout, OFFLINE) == found


def test_what_the_operator_has_is_not_missing(checkout: Checkout) -> None:
    for server in ("emails", "github", "canvas"):
        checkout.server(server)
    checkout.write("configs/token_key_session.py", FILLED)
    checkout.task(servers=("emails", "github", "canvas"), local_tools=("web_search",))
    checkout.write("suite.yaml", "services: {poste: {available: true}, canvas: {available: true}}\n")
    found = way(checkout)
    assert found == WayToRun(recording=True)
    assert found.text == "with a recording"


def test_a_task_with_a_file_that_has_an_error_is_broken(checkout: Checkout) -> None:
    checkout.server("github")
    checkout.write("configs/token_key_session.py", UNFILLED)
    checkout.task(servers=("github",))
    suite = checkout.load()
    task = suite.tasks["find-paper"]
    error = file_error(suite.path / task.folder / "evaluation/rubric.yaml", "not YAML")
    requirements = [*missing_requirements(suite, task, HostInfo()), broken_file(suite, error)]
    found = way_to_run(suite, task, requirements)
    assert found.name == "broken"
    assert found.text == f"broken: {task.folder}/evaluation/rubric.yaml; cannot run: github_token"
    assert count_ways([found]) == {"broken": 1}
