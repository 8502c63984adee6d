"""Readiness checks: `doctor` for the whole machine, and the check that a server makes when it starts."""

from __future__ import annotations

import http.client
import itertools
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import anyio.to_thread
from rich.console import Console
from rich.text import Text

from decathlon_mcp.app import (
    check_provider,
    create_provider,
    create_sandbox_factory,
    host_info,
    image_for,
    provider_for,
)
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.requirements import HostInfo, MissingRequirement
from decathlon_mcp.cli.options import describe_unknown_variables, unknown_variables
from decathlon_mcp.cli.tasks import summarize_missing
from decathlon_mcp.driver_client.merging import check_merging
from decathlon_mcp.episodes.program_probe import probe_programs
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.rubric_probe import RubricCheck, check_rubrics
from decathlon_mcp.errors import DecathlonError, ProviderUnavailableError, SettingsError
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.listening import hosts_for, listen
from decathlon_mcp.sandboxes.base import Finding, Provider, finding
from decathlon_mcp.sandboxes.docker.engine import engine_address
from decathlon_mcp.sandboxes.docker.limits import check_engine_limits
from decathlon_mcp.sandboxes.kernel_limits import check_kernel_limits
from decathlon_mcp.settings import ProviderName, Settings
from decathlon_mcp.storage.keys import KEY_FILE
from decathlon_mcp.storage.store import Store
from decathlon_mcp.suites.loading import STARTER, load_suite
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import as_object
from decathlon_mcp.web.proxy import find_program

STARTER_SERVERS = ("excel_mcp", "mcp_server_git")
"""Modules of the extra `starter`."""
RUNNING = "server"
"""The finding that a server runs at the address already."""
SERVER_SECONDS = 2.0
PROXY_SECONDS = 30.0
MAX_HEALTH_BYTES = 65_536
MAX_ERRORS = 8
"""Errors in rubrics that a finding shows."""
WARNINGS = ("time", "disk", "merging thread", "merging in a sandbox")
"""Findings with which a server can still start."""

log = logging.getLogger("decathlon.cli")


async def doctor(settings: Settings, host: str, port: int, as_json: bool) -> int:
    """Print findings on stdout as they are made; return 0 if a server with these settings can work."""
    findings: list[Finding] = []
    console = Console(highlight=False)
    async for result in _findings(settings, host, port):
        findings.append(result)
        if not as_json:
            console.print(_format(result), soft_wrap=True)
    problems = [result for result in findings if not result.ok]
    if as_json:
        report = {"ready": not problems, "findings": [asdict(result) for result in findings]}
        sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    elif problems:
        console.print(f"\nNot ready: {', '.join(result.what for result in problems)}")
    elif any(result.what == RUNNING for result in findings):
        console.print("\nReady: a server is running")
    else:
        console.print("\nReady: start the server with `decathlon-mcp serve` and the same settings")
    return 1 if problems else 0


async def _findings(settings: Settings, host_name: str, port: int) -> AsyncGenerator[Finding]:
    yield Finding("python", True, f"{platform.python_version()} at {sys.executable}")
    if unknown := unknown_variables():
        described = describe_unknown_variables(unknown)
        # One that is probably misspelt does not do what its user expects.
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
    try:
        check_provider(settings)
    except SettingsError as error:
        yield Finding("provider", False, error.message, "see --provider and --provider-option")
        return
    try:
        host = await anyio.to_thread.run_sync(host_info, suites, settings)
    except SettingsError as error:
        yield Finding("isolation", False, error.message, "see --isolation")
    else:
        for result in _check_tasks(suites, host):
            yield result
        async for result in _check_providers(suites, settings):
            yield result
    if suites:
        yield check_kernel_limits(settings.max_sandboxes)
        if any(provider_for(suite, settings) == "docker" for suite in suites):
            engine = check_engine_limits(settings.max_sandboxes, engine_address())
            if engine is not None:
                yield engine
    if settings.web is not None:
        yield await anyio.to_thread.run_sync(_check_web, settings)
    yield _check_state(settings.state)
    yield _check_key(settings.state)
    yield await _check_address(settings, host_name, port)


def _check_tasks(suites: list[Suite], host: HostInfo) -> Iterable[Finding]:
    for suite in suites:
        count = len(suite.tasks)
        yield Finding(f"suite {suite.name}", True, f"{count} tasks at {suite.path} ({suite.version_text})")
    if not suites:
        return
    try:
        catalogue = Catalogue(suites, host=host)
    except DecathlonError as error:
        yield Finding("suites", False, error.message, "give each suite a different name")
        return
    missing = [catalogue.missing_requirements(suite, task) for _, suite, task in catalogue]
    runnable = sum(not requirements for requirements in missing)
    yield finding(
        "tasks",
        runnable > 0,
        f"{runnable} of {len(missing)} can run here{_summary(missing)}",
        "`decathlon-mcp tasks --check` shows what each task lacks",
    )


def _summary(missing: list[list[MissingRequirement]]) -> str:
    return "".join(f"\n{line}" for line in summarize_missing(itertools.chain(*missing)))


async def _check_providers(suites: list[Suite], settings: Settings) -> AsyncGenerator[Finding]:
    checked: dict[tuple[ProviderName, str | None], bool] = {}
    for suite in suites:
        name = provider_for(suite, settings)
        try:
            image = image_for(suite, settings)
        except SettingsError as error:
            yield Finding(f"{name} image", False, error.message, "see --provider, --image and --network")
            continue
        if (name, image) not in checked:
            results = await _check_provider(name, image, suite, settings)
            checked[(name, image)] = all(result.ok for result in results)
            for result in results:
                yield Finding(f"{name} {result.what}", result.ok, result.detail, result.cure)
        for result in await _check_rubrics(suite, settings, can_open=checked[(name, image)]):
            yield result
        if name == "local" and suite.profile.name == "starter":
            absent = [module for module in STARTER_SERVERS if find_spec(module) is None]
            yield finding(
                "starter servers",
                not absent,
                f"not installed: {', '.join(absent)}" if absent else ", ".join(STARTER_SERVERS),
                "pip install 'decathlon-mcp[starter]'",
            )


async def _check_provider(
    name: ProviderName, image: str | None, suite: Suite, settings: Settings
) -> list[Finding]:
    async with create_provider(name, f"doctor-{os.getpid()}", settings) as provider:
        return await _provider_findings(provider, image, suite, dense=settings.dense)


async def _provider_findings(
    provider: Provider, image: str | None, suite: Suite, *, dense: bool
) -> list[Finding]:
    """What `doctor` prints about a provider, and what a server must find before it starts."""
    findings = await provider.check(image)
    if dense and all(result.ok for result in findings):
        findings += await check_merging(provider, image, suite.profile.root)
    return findings


async def _open_and_check_rubrics(suite: Suite, settings: Settings) -> RubricCheck:
    # In a state folder of its own: this one may not exist yet, and a server makes it.
    with tempfile.TemporaryDirectory(prefix="decathlon-doctor-") as folder:
        own = settings.model_copy(update={"state": Path(folder)})
        common = Path(folder) / "common.tar"
        await anyio.to_thread.run_sync(suite.common_archive, common)
        async with create_provider(provider_for(suite, own), f"doctor-{os.getpid()}", own) as provider:
            return await check_rubrics(suite, create_sandbox_factory(suite, provider, common, own))


async def _check_rubrics(suite: Suite, settings: Settings, *, can_open: bool) -> Iterable[Finding]:
    """A finding about a suite's rubrics, if it has any. `can_open`: whether its sandboxes can be opened."""
    if suite.path == STARTER:
        return []
    check = await _open_and_check_rubrics(suite, settings) if can_open else await check_rubrics(suite, None)
    if not check.count:
        return []
    errors = [error.message for error in check.errors.values()]
    shown = errors[:MAX_ERRORS] + ([f"{len(errors) - MAX_ERRORS} more"] if len(errors) > MAX_ERRORS else [])
    detail = (
        f"{len(errors)} of {check.count} are invalid\n" + "\n".join(shown) if errors else f"{check.count}"
    )
    if check.unchecked:
        detail += f"\ntheir functions could not be imported: {check.unchecked}"
    cure = "docs/rewards.md#dense-rewards explains rubrics; `decathlon-mcp tasks --check` names the tasks"
    return [finding(f"rubrics of {suite.name}", not errors, detail, cure)]


def _check_web(settings: Settings) -> Finding:
    """The recording proxy can be run. Blocks."""
    try:
        program = find_program(settings.web_proxy)
    except SettingsError as error:
        return Finding("web", False, error.message, "docs/recorded-web.md#record")
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=PROXY_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeError) as error:
        return Finding("web", False, f"{program} does not run: {error}", "docs/recorded-web.md#record")
    version = done.stdout.partition("\n")[0].strip()
    return finding(
        "web", version.startswith("Mitmproxy"), f"{version} at {program}", f"{program} is another program"
    )


def _check_state(folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
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
            return Finding(RUNNING, True, f"{running}; another one needs another --port")
        return Finding("address", False, error.message, "see --host, --port and --tokens")
    return Finding("address", True, f"{host}:{port} is free")


def _server_state(host: str, port: int) -> str:
    """The state of the decathlon-mcp server at an address; empty if it is another program."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(local, port, timeout=SERVER_SECONDS)
    try:
        connection.request("GET", "/healthz")
        health = as_object(json.loads(connection.getresponse().read(MAX_HEALTH_BYTES))) or {}
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return ""
    finally:
        connection.close()
    return str(health["state"]) if {"status", "state", "episodes", "sandboxes"} <= health.keys() else ""


def _format(result: Finding) -> Text:
    first, *details = result.detail.splitlines()
    text = Text.assemble(
        ("ok  ", "green") if result.ok else ("✗   ", "bold red"), (f"{result.what}: ", "bold"), first
    )
    for detail in details:
        text.append(f"\n      {detail}", "dim")
    if result.cure and result.cure not in result.detail:
        text.append(f"\n    → {result.cure}", "yellow")
    return text


async def require_ready(episodes: EpisodeRegistry) -> None:
    """Check the providers (within 3 s), and which programs the MCP servers of a checkout lack.

    Raises ProviderUnavailableError saying what is missing and how to fix it.
    """
    await _require_providers(episodes)
    await check_programs(episodes)


async def check_programs(episodes: EpisodeRegistry) -> None:
    """Find out which programs the MCP servers of a checkout lack. Takes seconds; failures are logged."""
    for suite in episodes.catalogue.suites:
        if suite.path == STARTER:
            continue
        reason = await probe_programs(episodes.sandbox_factory(suite.name), episodes.catalogue)
        if reason is not None:
            log.warning("could not check the servers' programs", extra=fields(suite=suite.name, why=reason))


async def _require_providers(episodes: EpisodeRegistry) -> None:
    checked: set[tuple[str, str | None]] = set()
    for suite in episodes.catalogue.suites:
        factory = episodes.sandbox_factory(suite.name)
        provider, image = factory.provider, factory.image
        if (provider.name, image) in checked:
            continue
        checked.add((provider.name, image))
        for result in await _provider_findings(provider, image, suite, dense=factory.dense):
            if result.ok:
                continue
            if result.what in WARNINGS:
                log.warning(result.detail, extra=fields(provider=provider.name, cure=result.cure))
            else:
                raise ProviderUnavailableError(_problem_and_cure(result))


def _problem_and_cure(result: Finding) -> str:
    if not result.cure or result.cure in result.detail:
        return result.detail
    return f"{result.detail}; {result.cure}"
