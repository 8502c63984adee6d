"""The YAML files of servers, their templates, and the SERVER objects made of them."""

from __future__ import annotations

import json
import logging
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


def test_a_stdio_server(checkout: Checkout) -> None:
    checkout.server(
        "excel",
        """\
        type: stdio
        name: excel
        params:
          command: uv
          args: [run, excel-mcp-server, stdio]
          env: {LIMIT: 2048, VERBOSE: true, MODE: "fast"}
          cwd: "${agent_workspace}"
        client_session_timeout_seconds: 100
        cache_tools_list: true
        """,
    )
    assert specs(checkout, "excel") == [
        {
            "name": "excel",
            "command": "uv",
            "args": ["run", "excel-mcp-server", "stdio"],
            "env": {"UV_PROJECT": "/workspace", "LIMIT": "2048", "VERBOSE": "true", "MODE": "fast"},
            "inherit": "minimal",
            "cwd": "/workspace/dumps/workspace",
            "request_seconds": 100.0,
        }
    ]


WORKSPACE = "${agent_workspace}"


@pytest.mark.parametrize(
    ("command", "args", "cwd", "expected_args", "expected_env"),
    [
        (
            *("npx", ["-y", "@x/files"], WORKSPACE, ["--prefix", "/workspace", "-y", "@x/files"]),
            {"npm_config_script_shell": "/bin/sh"},
        ),
        ("uv", ["run", "excel"], WORKSPACE, ["run", "excel"], {"UV_PROJECT": "/workspace"}),
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
        ("uvx", ["tool"], WORKSPACE, ["tool"], {}),
        ("npx", ["-y", "@x/files"], None, ["-y", "@x/files"], {}),
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


def test_a_servers_own_environment_takes_precedence_over_that_of_its_launcher(checkout: Checkout) -> None:
    checkout.server(
        "a", 'params: {command: uv, args: [run, x], cwd: "${agent_workspace}", env: {UV_PROJECT: /other}}\n'
    )
    (spec,) = specs(checkout, "a")
    assert spec["env"] == {"UV_PROJECT": "/other"}


def test_the_gyms_launchers_are_started_as_they_are(gym: Checkout) -> None:
    gym.server("a", "params: {command: npx, args: [x]}\n")
    (spec,) = specs(gym, "a")
    assert spec["args"] == ["x"]
    assert "npm_config_script_shell" not in spec["env"]


def test_a_server_is_found_by_its_name_and_not_by_its_file(checkout: Checkout) -> None:
    checkout.server("rail_12306", file="12306")
    checkout.server("a")
    assert [spec["name"] for spec in specs(checkout, "rail_12306", "a")] == ["rail_12306", "a"]


def test_a_server_without_a_name_has_the_name_of_its_file(checkout: Checkout) -> None:
    checkout.server("", "params: {command: x}\n", file="plain")
    assert specs(checkout, "plain")[0]["command"] == "x"


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


def test_an_unknown_template_is_unchanged_and_logged(
    checkout: Checkout, caplog: pytest.LogCaptureFixture
) -> None:
    checkout.server("odd", "params: {command: x, args: ['${unknown.name}', '${HOME}']}\n")
    with caplog.at_level(logging.WARNING):
        (spec,) = specs(checkout, "odd")
    assert spec["args"] == ["${unknown.name}", "${HOME}"]
    assert {record.message for record in caplog.records} == {"unknown name in a template, left as it is"}
    assert [vars(record)["fields"]["name"] for record in caplog.records] == ["unknown.name", "HOME"]


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("type: sse\nparams: {url: 'http://localhost:8000/sse'}\n", 1, "type"),
        ("name: remote\ntype: Streamable_HTTP\nurl: 'http://localhost:8000/mcp'\n", 2, "type"),
        ("type: stdio\nparams:\n  command: x\n  url: 'http://localhost:8000/mcp'\n", 4, "params.url"),
        ("name: remote\nurl: 'http://localhost:8000/mcp'\n", 2, "url"),
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


def test_a_relative_cwd_is_below_the_root_and_null_is_a_missing_field(checkout: Checkout) -> None:
    checkout.server(
        "a", "url: null\nparams: {command: x, url: null, args: null, env: null, cwd: local_servers/a}\n"
    )
    (spec,) = specs(checkout, "a")
    assert (spec["cwd"], spec["args"], spec["env"]) == ("/workspace/local_servers/a", [], {})


def test_the_browser_runs_without_its_own_sandbox(checkout: Checkout) -> None:
    checkout.server("playwright_with_chunk", "params: {command: npx, args: [--headless]}\n")
    assert specs(checkout, "playwright_with_chunk")[0]["args"] == ["--headless", "--no-sandbox"]


def test_the_gyms_environment_overrides_that_of_a_server(gym: Checkout) -> None:
    gym.server(
        "rail", "params: {command: node, args: ['${local_servers_paths}/x'], env: {PG_HOST: db, A: b}}\n"
    )
    (spec,) = specs(gym, "rail")
    assert spec["args"] == ["/opt/local_servers/x"]
    assert spec["inherit"] == "all"
    assert spec["cwd"] == "/workspace/dumps/workspace"
    assert (spec["env"]["PG_HOST"], spec["env"]["A"]) == ("localhost", "b")


def test_folders_that_must_exist_when_a_server_starts(checkout: Checkout) -> None:
    for name in ("memory", "arxiv_local", "excel"):
        checkout.server(name)
    checkout.task(servers=("memory", "excel", "arxiv_local"))
    suite = checkout.load()
    assert suite.server_folders(suite.tasks["find-paper"]) == [
        PurePosixPath("memory"),
        PurePosixPath("arxiv_local_storage"),
    ]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("name: bad\nparams:\n  command: [x\n", 4, "not YAML"),
        ("name: bad\nparams:\n\tcommand: x\n", 3, "not YAML"),
        ("name: bad\ntype: pigeon\nparams: {command: x}\n", 2, "type: "),
        ("name: bad\nparams:\n  command: x\n  args:\n    - a\n    - [b]\n", 6, "params.args.1: "),
        (
            "name: bad\nparams:\n  command: x\nclient_session_timeout_seconds: -1\n",
            4,
            "must be greater than 0",
        ),
        ("name: bad\nparams: {}\n", 2, "params.command: is required"),
        ("name: bad\n", 1, "params: is required"),
        ("- name: bad\n", 1, "a mapping was expected"),
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


def test_an_unreadable_server_file_is_found_by_its_likely_name(checkout: Checkout) -> None:
    checkout.server("rail_12306", "name: 'rail_12306' # trains\nparams: [\n", file="12306")
    checkout.task(servers=("rail_12306",))
    (error,) = checkout.load().tasks["find-paper"].errors
    assert "not YAML" in error.message


def test_two_files_with_one_name_are_an_error(checkout: Checkout) -> None:
    checkout.server("twin", file="a")
    checkout.server("twin", file="b")
    checkout.task(servers=("twin",))
    with pytest.raises(SuiteError, match=r"b\.yaml: name: a\.yaml has a server 'twin' too"):
        checkout.load().task("find-paper")


def test_an_empty_file_is_no_server(checkout: Checkout) -> None:
    checkout.server("empty", "# nothing yet\n")
    checkout.task()
    assert dict(checkout.load().servers) == {}
