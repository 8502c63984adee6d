"""`doctor`: what is ready, and a cure for what is not."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from tests.probe.serving import SUITE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Shell


def findings(
    shell: Shell, *words: str, status: int, port: int = 0, **variables: str
) -> dict[str, dict[str, Any]]:
    done = shell.run("doctor", "--port", str(port), "--json", *words, **variables)
    assert done.returncode == status, done
    told = json.loads(done.stdout)
    assert told["ready"] is (status == 0)
    for each in told["findings"]:
        assert set(each) == {"what", "ok", "detail", "cure"}
        assert each["ok"] or each["cure"], each
    return {each["what"]: each for each in told["findings"]}


def test_where_the_default_job_can_run_all_is_well(shell: Shell) -> None:
    found = findings(shell, status=0)
    assert all(each["ok"] for each in found.values())
    assert {"python", "suite starter", "tasks", "local python3", "starter servers", "state"} <= set(found)


def test_the_key_of_signatures_is_named_and_one_that_others_can_read_is_told(
    shell: Shell, tmp_path: Path
) -> None:
    assert "created when the server first starts" in findings(shell, status=0)["key"]["detail"]
    told = json.loads(shell.run("key").stdout)
    assert told["id"] in findings(shell, status=0)["key"]["detail"]
    (tmp_path / "state" / "decathlon-mcp" / "key").chmod(0o644)
    assert "can be read by others" in findings(shell, status=1)["key"]["detail"]


def test_people_read_ok_and_crosses_with_cures(shell: Shell) -> None:
    done = shell.run("doctor", "--port", "0", "--provider", "docker", DOCKER_HOST="unix:///nowhere")
    assert done.returncode == 1
    assert "ok  python: " in done.stdout
    assert "✗   docker engine: no Docker engine answers at unix:///nowhere" in done.stdout
    assert done.stdout.endswith("Not ready: docker engine\n")


def test_a_taken_port_is_found(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = findings(shell, port=taken.getsockname()[1], status=1)
    assert "Address already in use" in found["address"]["detail"]


def test_a_folder_that_is_no_suite_is_found(shell: Shell) -> None:
    assert "is not a checkout" in findings(shell, "--suite", ".", status=1)["suite ."]["detail"]


def test_a_state_folder_that_cannot_be_made_is_found(shell: Shell) -> None:
    (shell.folder / "file").write_text("")
    found = findings(shell, "--suite", SUITE, "--provider", "local", "--state", "file/state", status=1)
    assert not found["state"]["ok"]


def test_variables_that_are_no_settings_are_named(shell: Shell) -> None:
    found = findings(shell, status=0, DECATHLON_MAX_SANDBOXEZ="8")
    assert "DECATHLON_MAX_SANDBOXEZ" in found["variables"]["detail"]


def test_what_tasks_lack_is_told_in_classes(shell: Shell) -> None:
    task = shell.folder / "suite" / "tasks" / "finalpool" / "needy"
    for part in ("docs", "evaluation"):
        (task / part).mkdir(parents=True)
    (task / "docs" / "task.md").write_text("Do it.")
    (task / "evaluation" / "main.py").write_text("")
    (task / "task_config.json").write_text(json.dumps({"needed_mcp_servers": ["unheard-of"]}))
    (shell.folder / "suite" / "suite.yaml").write_text("profile: starter\nname: needy\n")
    found = findings(shell, "--suite", "suite", "--provider", "local", status=1)
    assert found["tasks"]["detail"].startswith("0 of 1 can run here")
    assert "MCP servers not described: unheard-of (1)" in found["tasks"]["detail"]
