"""The YAML files of servers, their templates, and the SERVER objects made of them."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest

from decathlon_mcp.errors import SuiteError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.suites.conftest import Checkout

ROOT = PurePosixPath("/workspace")


def specs(checkout: Checkout, *servers: str, values: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    checkout.task(servers=servers)
    suite = checkout.load()
    return suite.server_specs(suite.tasks["find-paper"], root=ROOT, values=values or {})


WORKSPACE = "${agent_workspace}"


@pytest.mark.parametrize(
    ("command", "args", "cwd", "expected_args", "expected_env"),
    [
        (
            *("npx", ["-y", "@x/files"], WORKSPACE, ["--prefix", "/workspace", "-y", "@x/files"]),
            {"npm_config_script_shell": "/bin/sh"},
        ),
        (
            *(
                "uv",
                ["run", "python", "-m", "utils.arxiv"],
                WORKSPACE,
                ["run", "python", "-m", "utils.arxiv"],
            ),
            {"UV_PROJECT": "/workspace", "PYTHONSAFEPATH": "1"},
        ),
        ("uv", ["--directory", "/x", "run", "y"], WORKSPACE, ["--directory", "/x", "run", "y"], {}),
        ("uv", ["run", "-m", "git"], None, ["run", "-m", "git"], {}),
    ],
)
def test_a_launcher_that_starts_in_the_workspace_looks_for_programs_in_the_root(
    checkout: Checkout,
    command: str,
    args: list[str],
    cwd: str | None,
    expected_args: list[str],
    expected_env: dict[str, str],
) -> None:
    checkout.server("a", json.dumps({"params": {"command": command, "args": args, "cwd": cwd}}))
    (spec,) = specs(checkout, "a")
    assert (spec["args"], spec["env"]) == (expected_args, expected_env)


def test_a_server_is_found_by_its_name_and_not_by_its_file(checkout: Checkout) -> None:
    checkout.server("rail_12306", file="12306")
    checkout.server("a")
    assert [spec["name"] for spec in specs(checkout, "rail_12306", "a")] == ["rail_12306", "a"]


def test_every_kind_of_template_is_filled(checkout: Checkout) -> None:
    checkout.server(
        "all",
        """\
        name: all
        params:
          command: ${local_binary_paths}/all
          args: ["${local_servers_paths}/a", "--key=${token.key}", "${config.mode}:${token.key}"]
          env:
            RUNTIME: ${podman_or_docker}
            TASK: ${task_dir}/email_config.json
            WORKSPACE: ${agent_workspace}/memory
        """,
    )
    values = {"token.key": "k", "config.mode": "m", "config.podman_or_docker": "podman"}
    (spec,) = specs(checkout, "all", values=values)
    assert spec["command"] == "/workspace/local_binary/all"
    assert spec["args"] == ["/workspace/local_servers/a", "--key=k", "m:k"]
    assert spec["env"] == {
        "RUNTIME": "podman",
        "TASK": "/workspace/tasks/finalpool/find-paper/email_config.json",
        "WORKSPACE": "/workspace/dumps/workspace/memory",
    }
    assert spec["cwd"] == "/workspace"
    suite = checkout.load()
    assert suite.token_names(suite.tasks["find-paper"]) == values.keys()


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("type: sse\nparams: {url: 'http://localhost:8000/sse'}\n", 1, "type"),
        ("type: stdio\nparams:\n  command: x\n  url: 'http://localhost:8000/mcp'\n", 4, "params.url"),
    ],
)
def test_a_server_reached_by_url_is_an_error_of_its_tasks_that_names_mcp_remote(
    checkout: Checkout, text: str, line: int, field: str
) -> None:
    path = checkout.server("remote", text)
    checkout.server("good")
    checkout.task("affected", servers=("good", "remote"))
    checkout.task("fine", servers=("good",))
    suite = checkout.load()
    assert suite.task("fine").errors == ()
    (error,) = suite.tasks["affected"].errors
    assert error.message.startswith(f"{path}, line {line}: {field}: servers that are reached by URL are not")
    assert "`command: npx` and `args: [-y, mcp-remote, URL]`" in error.message
    assert "localhost:8000" not in error.message, "a URL may contain a secret"


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("name: bad\nparams:\n  command: [x\n", 4, "not YAML"),
        ("name: bad\ntype: pigeon\nparams: {command: x}\n", 2, "type: "),
        ("name: bad\nparams:\n  command: x\n  args:\n    - a\n    - [b]\n", 6, "params.args.1: "),
        ("name: bad\nparams: {}\n", 2, "params.command: is required"),
    ],
)
def test_an_error_in_a_server_file_names_its_line_and_affects_only_its_tasks(
    checkout: Checkout, text: str, line: int, problem: str
) -> None:
    path = checkout.server("bad", text)
    checkout.server("good")
    checkout.task("affected", servers=("good", "bad"))
    checkout.task("fine", servers=("good",))
    suite = checkout.load()
    assert suite.task("fine").errors == ()
    with pytest.raises(SuiteError) as raised:
        suite.task("affected")
    assert raised.value.message.startswith(f"{path}, line {line}: ")
    assert problem in raised.value.message
    with pytest.raises(SuiteError):
        suite.server_specs(suite.tasks["affected"], root=ROOT, values={})


def test_two_files_with_one_name_are_an_error(checkout: Checkout) -> None:
    checkout.server("twin", file="a")
    checkout.server("twin", file="b")
    checkout.task(servers=("twin",))
    with pytest.raises(SuiteError, match=r"b\.yaml: name: a\.yaml has a server 'twin' too"):
        checkout.load().task("find-paper")
