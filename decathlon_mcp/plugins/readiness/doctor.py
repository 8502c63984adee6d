"""`doctor`: prints whether a server with these settings can work on this machine."""

from __future__ import annotations

import http.client
import itertools
import json
import platform
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import anyio.to_thread
from cyclopts import Parameter

from decathlon_mcp.app import create_catalogue
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.requirements import broken_file
from decathlon_mcp.cli.options import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    SANDBOX_SETTINGS,
    Flag,
    Host,
    Port,
    describe_unknown_variables,
    run_async,
    settings_model,
    unknown_variables,
)
from decathlon_mcp.cli.output import print_json, this_command
from decathlon_mcp.cli.terminal import Terminal
from decathlon_mcp.errors import DecathlonError, SettingsError
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.listening import hosts_for, listen
from decathlon_mcp.plugins.readiness.list_tasks import (
    broken_tasks,
    look_into_sandboxes,
    runnable_text,
    summarize_missing,
)
from decathlon_mcp.plugins.readiness.machine import format_finding
from decathlon_mcp.sandboxes.base import Finding, finding
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.disk import can_create_in
from decathlon_mcp.storage.keys import KEY_FILE
from decathlon_mcp.storage.store import Store
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.types import as_object

DoctorOptions = settings_model("DoctorOptions", (*SANDBOX_SETTINGS, "merge_pages", "tokens"), like="doctor")
DoctorSettings = Annotated[DoctorOptions, Parameter(name="*")]
DOCTOR_DEFAULTS = DoctorOptions.model_validate({})


def doctor(
    *,
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    unpack: Annotated[
        tuple[str, Path] | None, Parameter(metavar="IMAGE DIR", env_var=(), negative=())
    ] = None,
    json: Flag = False,
    settings: DoctorSettings = DOCTOR_DEFAULTS,
) -> int:
    """Check this machine, and say how to fix what is not ready.

    Parameters
    ----------
    unpack
        Write an image's files and configuration into a folder that is empty or missing, for `--provider host
        --image DIR`, and do nothing else. Only `--unpack` needs a Docker engine. If you are root, the files
        get an owner without an account, and sandboxes run as this owner; otherwise the files are yours.
    host
        Address that `serve` would listen on.
    port
        Port that `serve` would listen on.
    json
        Print `{"ready": ..., "findings": [...]}`.
    """
    if unpack is not None:
        from decathlon_mcp.plugins.docker.image import unpack_for_host

        return run_async(unpack_for_host, unpack[0], unpack[1].absolute())
    return run_async(print_findings, settings, host, port, json)


RUNNING = "server"
"""The finding that a server runs at the address already."""
MAX_HEALTH_BYTES = 65_536


async def print_findings(settings: Settings, host: str, port: int, as_json: bool) -> int:
    """Print findings on stdout as they are made; return 0 if a server with these settings can work."""
    findings: list[Finding] = []
    console = Terminal(highlight=False)
    async with aclosing(_findings(settings, host, port)) as results:
        async for result in results:
            findings.append(result)
            if not as_json:
                console.print(format_finding(result), soft_wrap=True)
    problems = [result for result in findings if not result.ok]
    if as_json:
        print_json({"ready": not problems, "findings": [result.to_json() for result in findings]})
    elif problems:
        console.print(f"\nNot ready: {', '.join(result.what for result in problems)}", soft_wrap=True)
    elif any(result.what == RUNNING for result in findings):
        console.print("\nReady: a server is running")
    else:
        ready = f"\nReady: start the server with `{this_command()} serve` and the same settings"
        console.print(ready, markup=False, soft_wrap=True)
    return 1 if problems else 0


async def _findings(settings: Settings, host_name: str, port: int) -> AsyncGenerator[Finding]:
    yield Finding("python", True, f"{platform.python_version()} at {sys.executable}")
    if unknown := unknown_variables():
        described = describe_unknown_variables(unknown)
        # A misspelt variable does not do what its user expects.
        yield finding(
            "variables",
            not any(unknown.values()),
            f"set, but not settings: {described}",
            "unset or rename them",
        )
    suites: list[Suite] = []
    for where in settings.suite:
        try:
            suites.append(load_suite(where, settings.language))
        except DecathlonError as error:
            yield Finding(f"suite {where}", False, error.message, "give the path of a checkout: --suite PATH")
    catalogue: Catalogue | None = None
    try:
        catalogue = await anyio.to_thread.run_sync(create_catalogue, suites, settings)
    except DecathlonError as error:
        yield Finding("settings", False, error.message, "docs/operating.md#settings")
    if catalogue is not None and suites:
        async with aclosing(_check_suites(catalogue, settings)) as results:
            async for result in results:
                yield result
    for part in (part for plugin in plugins() for part in plugin.findings):
        for result in await anyio.to_thread.run_sync(lambda part=part: [*load(part)(settings)]):
            yield result
    yield _check_state(settings.state)
    yield _check_key(settings.state)
    yield await _check_address(settings, host_name, port)


async def _check_suites(catalogue: Catalogue, settings: Settings) -> AsyncGenerator[Finding]:
    for suite in catalogue.suites:
        count = len(suite.tasks)
        yield Finding(f"suite {suite.name}", True, f"{count} tasks at {suite.path} ({suite.version_text})")
    findings: list[Finding] = []
    try:
        async with aclosing(look_into_sandboxes(catalogue, settings, "doctor")) as results:
            async for result in results:
                findings.append(result)
                yield result
    except SettingsError as error:
        findings.append(Finding("settings", False, error.message, "docs/operating.md#settings"))
        yield findings[-1]
    obstacles = [result.what for result in findings if result.required and not result.ok]
    broken = broken_tasks(findings)
    missing = [
        [
            *catalogue.missing_requirements(suite, task),
            *(broken_file(suite, error) for error in broken.get((suite.name, task.id), ())),
        ]
        for _, suite, task in catalogue
    ]
    complete = sum(not requirements for requirements in missing)
    summary = summarize_missing(itertools.chain(*missing))
    yield finding(
        "tasks",
        complete > 0 and not obstacles,
        "\n".join([runnable_text(complete, len(missing), obstacles), *summary]),
        "`decathlon-mcp tasks --check` shows what each task lacks",
    )


def _check_state(folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    writable = can_create_in(existing)
    try:
        with Store.open_read_only(folder):
            pass
    except (SettingsError, OSError) as error:
        return Finding("state", False, str(error), "choose another folder with --state")
    return finding(
        "state", writable, f"{folder}", f"{existing} is not writable: choose another folder with --state"
    )


def _check_key(state: Path) -> Finding:
    if not (state / KEY_FILE).exists():
        return Finding("key", True, "none yet: created when the server first starts")
    try:
        return Finding("key", True, f"verdicts are signed with {Signer.at(state).public.id}")
    except DecathlonError as error:
        return Finding("key", False, error.message, "make it readable by its owner only, or delete it")


async def _check_address(settings: Settings, host: str, port: int) -> Finding:
    try:
        hosts_for(host, (), Tokens.read(settings.tokens))
        listen(host, port).close()
    except DecathlonError as error:
        if error.data.get("inUse") and (state := await anyio.to_thread.run_sync(_server_state, host, port)):
            running = f"a decathlon-mcp server listens at {host}:{port} already (state: {state})"
            return Finding(RUNNING, True, f"{running}; another one needs a --port and a --state of its own")
        return Finding("address", False, error.message, "see --host, --port and --tokens")
    return Finding("address", True, f"{host}:{port} is free")


def _server_state(host: str, port: int) -> str:
    """The state of the decathlon-mcp server at an address; empty if it is another program."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(local, port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        health = as_object(json.loads(connection.getresponse().read(MAX_HEALTH_BYTES))) or {}
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return ""
    finally:
        connection.close()
    return str(health["state"]) if {"status", "state", "episodes", "sandboxes"} <= health.keys() else ""
