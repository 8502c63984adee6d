"""A server of a registry answers byte for byte the same in both ways of starting."""

from __future__ import annotations

import json

import pytest

from decathlon_mcp.errors import DriverError
from decathlon_mcp.plugins.conformance.conformance import ROOT
from tests.fakes.calls import call_server
from tests.preload.conftest import STATE, Machine, spec_of

pytestmark = pytest.mark.anyio

REPOSITORY = str(ROOT / "repository")
GIT = spec_of("git", "-P", "-m", "mcp_server_git", "--repository", REPOSITORY)
LIBRARIES = ("mcp.server.stdio", "mcp", "pydantic", "click", "anyio._backends._asyncio")


async def answers(machine: Machine) -> list[bytes]:
    """The tools and the replies of a server, as it sent them."""
    async with machine.sandbox(GIT) as (sandbox, driver):
        repository = ["git", "init", "--initial-branch", "main", REPOSITORY]
        await driver.run(repository, cwd=str(sandbox.root), timeout_seconds=30)
        info = await driver.start(["git"], deadline_seconds=60)
        found = [json.dumps(info["git"].tools).encode()]
        for tool in ("git_status", "git_log", "git_nothing"):
            reply = await call_server(driver, "git", {"name": tool, "arguments": {"repo_path": REPOSITORY}})
            found.append(reply.result or json.dumps(reply.error).encode())
        return found


@pytest.mark.slow
async def test_a_server_answers_the_same_in_both_ways(machine: Machine) -> None:
    cold = await answers(machine)
    await machine.preload(GIT, LIBRARIES)
    machine.preloads.cold.clear()
    assert await answers(machine) == cold
    assert not machine.preloads.cold


async def test_a_server_that_ends_at_once_fails_the_same_in_both_ways(machine: Machine) -> None:
    spec = spec_of("plain", str(ROOT / "servers/plain.py"))
    errors: list[object] = []
    for _ in range(2):
        async with machine.sandbox(spec) as (_, driver):
            with pytest.raises(DriverError) as error:
                await driver.start(["plain"], deadline_seconds=60)
            errors.append((error.value.message, error.value.data))
        if len(errors) == 1:
            await machine.preload(spec, ["idna"])
            machine.preloads.cold.clear()
    assert errors[0] == errors[1]
    assert not machine.preloads.cold


async def test_servers_whose_start_differs_start_by_themselves(machine: Machine) -> None:
    """What a sandbox has of its own before a server starts counts as if no library had been imported."""
    await machine.preload(STATE)
    async with machine.sandbox(STATE) as (_, driver):
        folder = ROOT / "servers/mcp"
        await driver.run(
            ["sh", "-c", f"mkdir {folder}; touch {folder}/__init__.py"], cwd="/", timeout_seconds=30
        )
        with pytest.raises(DriverError, match="ended with exit code 1"):
            await driver.start(["state"], deadline_seconds=60)
    assert machine.preloads.cold == ["there is another mcp in the program's folder"]
    for variables in ({"PYTHONHASHSEED": "7"}, {"OTEL_PYTHON_CONTEXT": "contextvars_context"}):
        async with machine.sandbox({**STATE, "env": {**STATE["env"], **variables}}) as (_, driver):
            await driver.start(["state"], deadline_seconds=60)
            # Forks have it, whose interpreter was started by this process.
            found = await machine.call(driver, "run", code="import gc; print(gc.get_freeze_count())")
            assert found == "0\n"


async def test_a_program_with_the_name_of_a_library_is_no_module(machine: Machine) -> None:
    """Folders of programs have such: `bin/httpx` of the package `httpx`."""
    await machine.preload(STATE)
    async with machine.sandbox(STATE) as (_, driver):
        await driver.run(["touch", str(ROOT / "servers/mcp")], cwd="/", timeout_seconds=30)
        await driver.start(["state"], deadline_seconds=60)
        assert await machine.call(driver, "run", code="import gc; print(gc.get_freeze_count())") != "0\n"
    assert not machine.preloads.cold
