"""`doctor`: findings, and how to fix what is not ready."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.app import bootstrap
from decathlon_mcp.cli.readiness import require_ready
from decathlon_mcp.plugins.readiness.doctor import print_findings
from decathlon_mcp.sandboxes.base import Finding
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.settings import read_settings
from tests.cli.conftest import Shell

pytestmark = pytest.mark.slow


def findings(
    shell: Shell, *arguments: str, status: int, port: int = 0, **variables: str
) -> dict[str, dict[str, Any]]:
    done = shell.run("doctor", "--port", str(port), "--json", *arguments, **variables)
    assert done.returncode == status, done
    report = json.loads(done.stdout)
    assert report["ready"] is (status == 0)
    for finding in report["findings"]:
        assert set(finding) == {"what", "ok", "detail", "cure"}
        assert finding["ok"] or finding["cure"], finding
    return {finding["what"]: finding for finding in report["findings"]}


def test_the_default_settings_are_ready(shell: Shell) -> None:
    results = findings(shell, status=0)
    assert all(finding["ok"] for finding in results.values())
    assert {"python", "suite starter", "tasks", "host python3", "starter servers", "state"} <= set(results)
    # On one line, however long the path of this environment is.
    done = shell.run("doctor", "--port", "0", COLUMNS="40")
    command = re.fullmatch(r"Ready: .* `(.*) serve` .*", done.stdout.splitlines()[-1])
    assert command is not None
    shell.check_printed(f"{command[1]} serve")


def test_the_signing_key_is_named_and_must_not_be_readable_by_others(shell: Shell, tmp_path: Path) -> None:
    assert "created when the server first starts" in findings(shell, status=0)["key"]["detail"]
    key = json.loads(shell.run("key").stdout)
    assert key["id"] in findings(shell, status=0)["key"]["detail"]
    (tmp_path / "state" / "decathlon-mcp" / "key").chmod(0o644)
    assert "can be read by others" in findings(shell, status=1)["key"]["detail"]


@pytest.mark.usefixtures("namespaces")
def test_namespaces_are_a_finding(shell: Shell) -> None:
    assert findings(shell, status=0)["host isolation"]["detail"].startswith("namespaces: ")


def test_missing_isolation_is_a_finding(shell: Shell) -> None:
    result = findings(shell, "--isolation", "none", status=0)["host isolation"]
    assert result["detail"] == "none: sandboxes are processes of this user"
    # No programs, and so no bwrap.
    empty = str(shell.folder)
    assert "there is no bwrap" in findings(shell, status=0, PATH=empty)["host isolation"]["detail"]
    result = findings(shell, "--isolation", "namespaces", status=1, PATH=empty)["settings"]
    assert result["detail"].startswith("--isolation namespaces: there is no bwrap on the PATH: install")


@pytest.mark.usefixtures("own_network")
def test_the_program_for_networks_of_sandboxes_is_a_finding(shell: Shell) -> None:
    program = shutil.which("slirp4netns")
    assert program is not None
    assert findings(shell, status=0)["host network"]["detail"].startswith(f"{program}: ")
    for name in ("bwrap", "setpriv", "nsenter", "python3", "sh"):
        (shell.folder / name).symlink_to(str(shutil.which(name)))
    result = findings(shell, status=0, PATH=str(shell.folder))["host network"]
    assert "there is no slirp4netns on the PATH: install slirp4netns and iproute2" in result["detail"]


def test_the_program_that_records_the_web_is_a_finding(shell: Shell) -> None:
    program = shell.folder / "mitmdump"
    arguments = ("--web", "replay", "--web-proxy", str(program))
    assert "make mitmproxy" in findings(shell, *arguments, status=1)["web"]["detail"]
    program.write_text("#!/bin/sh\necho 'Mitmproxy: 11.0.2'\n")
    program.chmod(0o755)
    assert findings(shell, *arguments, status=0)["web"]["detail"] == f"Mitmproxy: 11.0.2 at {program}"


def test_no_task_can_run_without_what_a_server_needs_to_start(shell: Shell) -> None:
    docker = ("--provider", "docker")
    results = findings(shell, *docker, status=1, DOCKER_HOST="unix:///nosuch")
    detail = results["tasks"]["detail"]
    assert not results["docker engine"]["ok"]
    assert not results["tasks"]["ok"]
    assert detail.splitlines()[0] == "0 of 10 can run here without docker engine; 10 lack nothing else"
    checked = shell.run("tasks", "--check", *docker, DOCKER_HOST="unix:///nosuch")
    assert checked.returncode == 1
    assert "\n0 of 10 can run here without docker engine; 10 lack nothing else\n" in checked.stdout


def test_a_state_folder_that_cannot_be_created_is_a_finding(shell: Shell) -> None:
    results = findings(shell, "--state", "/proc/self/state", status=1)
    assert "choose another folder with --state" in results["state"]["cure"]
    assert not results["host folder"]["ok"]
    assert findings(shell, status=0)["state"]["ok"]
    assert list(Path(shell.environment["XDG_STATE_HOME"]).rglob(".decathlon-*")) == []


def test_a_port_in_use_is_a_finding(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        results = findings(shell, port=taken.getsockname()[1], status=1)
    assert "Address already in use" in results["address"]["detail"]


def test_variables_that_are_not_settings_are_named(shell: Shell) -> None:
    results = findings(shell, status=1, DECATHLON_MAX_SANDBOXEZ="8")
    assert "DECATHLON_MAX_SANDBOXEZ (did you mean DECATHLON_MAX_SANDBOXES?)" in results["variables"]["detail"]
    assert findings(shell, status=0, DECATHLON_OTHER="8")["variables"]["ok"]


def test_kernel_limits_that_do_not_suffice_come_with_what_to_set(shell: Shell) -> None:
    results = findings(shell, "--max-sandboxes", "1000000", status=1)
    instances = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    assert f"fs.inotify.max_user_instances is {instances}, 2000000 are" in results["kernel limits"]["detail"]
    assert "sysctl -w fs.inotify.max_user_instances=2000000" in results["kernel limits"]["cure"]


@pytest.mark.anyio
async def test_a_warning_is_marked_and_keeps_no_server_from_starting(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check(*_: object) -> list[Finding]:
        return [Finding("isolation", True, "weak", "choose another")]

    monkeypatch.setattr(HostProvider, "check", check)
    settings = read_settings({"isolation": "none", "state": tmp_path / "state"})
    assert await print_findings(settings, "127.0.0.1", 0, as_json=False) == 0
    output = capsys.readouterr().out
    assert "\n!   host isolation: weak\n    → choose another\n" in output
    assert "\nReady: " in output
    async with bootstrap(settings) as episodes:
        await require_ready(episodes, settings.max_sandboxes)
    logged = [record.__dict__["fields"] for record in caplog.records if record.levelname == "WARNING"]
    assert {"what": "host isolation", "why": "weak", "cure": "choose another"} in logged
