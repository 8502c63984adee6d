"""`doctor`: is this machine ready, and what to do about what is not."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from decathlon_mcp.app import provider_for
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.requirements import HostInfo, MissingRequirement
from decathlon_mcp.cli.check import summary
from decathlon_mcp.cli.options import strange_variables
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.sandboxes.base import Finding, finding
from decathlon_mcp.sandboxes.docker.provider import DEFAULT_NETWORK, DockerProvider
from decathlon_mcp.sandboxes.local.provider import LocalProvider
from decathlon_mcp.settings import ProviderName, Settings
from decathlon_mcp.storage.keys import KEY_FILE
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.suite import Suite

STARTER_SERVERS = ("excel_mcp", "mcp_server_git")
"""Modules of the extra `starter`."""


async def examine(settings: Settings, host: str, port: int, as_json: bool) -> int:
    """Print findings on stdout, each when it is known; 0 where a server of these settings can do its job."""
    found: list[Finding] = []
    console = Console(highlight=False)
    async for each in _findings(settings, host, port):
        found.append(each)
        if not as_json:
            console.print(_line(each), soft_wrap=True)
    bad = [each for each in found if not each.ok]
    if as_json:
        told = {"ready": not bad, "findings": [asdict(each) for each in found]}
        sys.stdout.write(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    elif bad:
        console.print(f"\nNot ready: {', '.join(each.what for each in bad)}")
    else:
        console.print("\nReady: start it with `decathlon-mcp serve` and the same settings")
    return 1 if bad else 0


async def _findings(settings: Settings, host: str, port: int) -> AsyncGenerator[Finding]:
    yield Finding("python", True, f"{platform.python_version()} at {sys.executable}")
    if strange := strange_variables():
        yield Finding("variables", True, f"set, but no settings: {', '.join(strange)}")
    suites: list[Suite] = []
    for where in settings.suite:
        try:
            suites.append(load_suite(where, settings.language))
        except DecathlonError as error:
            yield Finding(f"suite {where}", False, error.message, "say where a checkout is with --suite PATH")
    for each in _about_tasks(suites, HostInfo(has_network=settings.network != "none")):
        yield each
    async for each in _about_providers(suites, settings):
        yield each
    yield _about_state(settings.state)
    yield _about_key(settings.state)
    yield _about_address(settings, host, port)


def _about_tasks(suites: list[Suite], host: HostInfo) -> Iterable[Finding]:
    for suite in suites:
        count = len(suite.tasks)
        yield Finding(f"suite {suite.name}", True, f"{count} tasks at {suite.path} ({suite.revision})")
    if not suites:
        return
    try:
        catalogue = Catalogue(suites, host=host)
    except DecathlonError as error:
        yield Finding("suites", False, error.message, "give each suite a name of its own")
        return
    lacking = [catalogue.missing_requirements(suite, task) for _, suite, task in catalogue]
    runnable = sum(not lacks for lacks in lacking)
    yield finding(
        "tasks",
        runnable > 0,
        f"{runnable} of {len(lacking)} can run here{_lacks(lacking)}",
        "`decathlon-mcp tasks --check` says what each of them lacks",
    )


def _lacks(lacking: list[list[MissingRequirement]]) -> str:
    """What the others lack, by kinds, the most wanted first, with how many tasks want it."""
    return "".join(f"\n{line}" for line in summary(lack for lacks in lacking for lack in lacks))


async def _about_providers(suites: list[Suite], settings: Settings) -> AsyncGenerator[Finding]:
    asked: set[tuple[ProviderName, str | None]] = set()
    for suite in suites:
        name = provider_for(suite, settings)
        image = (settings.image or suite.profile.image) if name == "docker" else None
        if (name, image) not in asked:
            asked.add((name, image))
            for each in await _checked(name, image, settings):
                yield Finding(f"{name} {each.what}", each.ok, each.detail, each.cure)
        if name == "local" and suite.profile.name == "starter":
            lacking = [module for module in STARTER_SERVERS if find_spec(module) is None]
            yield finding(
                "starter servers",
                not lacking,
                f"not installed: {', '.join(lacking)}" if lacking else ", ".join(STARTER_SERVERS),
                "pip install 'decathlon-mcp[starter]'",
            )


async def _checked(name: ProviderName, image: str | None, settings: Settings) -> list[Finding]:
    owner = f"doctor-{os.getpid()}"
    if name == "local":
        return await LocalProvider(owner, settings.state / "sandboxes").check(None)
    network = settings.docker_network or DEFAULT_NETWORK
    async with DockerProvider(owner, network=network) as provider:
        return await provider.check(image)


def _about_state(folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return finding(
        "state", writable, f"{folder}", f"{existing} cannot be written to: name another with --state"
    )


def _about_key(state: Path) -> Finding:
    if not (state / KEY_FILE).exists():
        return Finding("key", True, "none yet: made at the first start")
    try:
        return Finding("key", True, f"verdicts are signed with {Signer.at(state).public.id}")
    except DecathlonError as error:
        return Finding("key", False, error.message, "let it be this user's alone, or remove it for another")


def _about_address(settings: Settings, host: str, port: int) -> Finding:
    # Only now: it takes a second to import, and all the rest has been told by then.
    from decathlon_mcp.http.authentication import Tokens
    from decathlon_mcp.http.server import hosts_for, listen

    try:
        hosts_for(host, (), Tokens.read(settings.tokens))
        listen(host, port).close()
    except DecathlonError as error:
        return Finding("address", False, error.message, "see --host, --port and --tokens")
    return Finding("address", True, f"{host}:{port} is free")


def _line(each: Finding) -> Text:
    first, *more = each.detail.splitlines()
    line = Text.assemble(
        ("ok  ", "green") if each.ok else ("✗   ", "bold red"), (f"{each.what}: ", "bold"), first
    )
    for said in more:
        line.append(f"\n      {said}", "dim")
    if each.cure and each.cure not in each.detail:
        line.append(f"\n    → {each.cure}", "yellow")
    return line
