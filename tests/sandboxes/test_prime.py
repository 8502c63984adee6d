"""The `prime` provider with the real SDK, against a stand-in of the service that runs real processes."""

from __future__ import annotations

import importlib
import json
import os
import secrets
from collections.abc import AsyncGenerator, Collection, Generator
from functools import partial
from pathlib import Path

import anyio
import pytest

from decathlon_mcp.driver.client import BOOT_COMMAND, connect
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.errors import BadRequestError, ProviderUnavailableError, SandboxLostError
from decathlon_mcp.plugins.conformance.conformance import (
    Check,
    checks_for,
    file_copies,
    first_processes,
    opening,
    survival,
)
from decathlon_mcp.plugins.conformance.target import (
    Probe,
    download,
    file_entry,
    pack,
    receive_all,
    receive_line,
)
from decathlon_mcp.plugins.prime import sandbox as prime_sandbox
from decathlon_mcp.plugins.prime.provider import OWNER_LABEL, REOPEN_SECONDS, PrimeOptions, PrimeProvider
from decathlon_mcp.sandboxes.base import ended_from_inside
from tests.sandboxes.conftest import Bench, bench_of, former
from tests.sandboxes.prime_service import KEY, PrimeService

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, namespaces: None) -> Generator[PrimeService]:
    pytest.importorskip("prime_sandboxes", reason="Prime's SDK is not installed")
    if os.geteuid() != 0:
        pytest.skip("the stand-in of the service needs root")
    messages = importlib.import_module("prime_sandboxes._proto.command_session.command_session_pb2")
    with PrimeService(messages) as service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIME_API_BASE_URL", service.url)
        patch.setenv("PRIME_API_KEY", KEY)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield service


@pytest.fixture
async def prime(service: PrimeService, tmp_path: Path) -> AsyncGenerator[Bench]:
    owner = f"test-{secrets.token_hex(4)}"

    async def resources() -> Collection[str]:
        owners = [f"{OWNER_LABEL}={label}" for label in (owner, former(owner))]
        return [machine.id for machine in service.living(*owners)]

    create = partial(PrimeProvider, folder=tmp_path / "prime", options=PrimeOptions(per_minute=6000))
    bench = bench_of(owner, tmp_path, create, resources, image="image-of-the-stand-in")
    async with bench.provider:
        yield bench
        await bench.assert_nothing_left()


SHORT = frozenset(
    {
        opening.ready_machine_passes_the_providers_own_check,
        survival.sandbox_is_reattached,
        survival.paused_sandbox_is_reattached_paused,
        file_copies.files_survive_a_round_trip,
        file_copies.dangerous_members_are_refused,
        first_processes.paused_sandbox_does_nothing_and_its_files_can_be_read,
        first_processes.detached_processes_end_with_the_sandbox,
    }
)
"""All checks take some two minutes; the others are long tests."""
LIMITS = (
    first_processes.memory_over_the_limit_is_the_cause_of_end,
    first_processes.number_of_processes_is_limited,
)
"""The service's stand-in limits nothing."""


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=check.__name__, marks=() if check in SHORT else pytest.mark.long)
        for check in checks_for()
        if check not in LIMITS
    ],
)
async def test_prime_conforms(prime: Bench, check: Check) -> None:
    await check(prime)


SURVIVAL = ReconnectPolicy(REOPEN_SECONDS)
ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


CUTS = 8
"""More than the SDK itself attaches again."""


async def test_calls_survive_more_cuts_than_the_sdk_does(prime: Bench, service: PrimeService) -> None:
    runs = 12 * CUTS
    outputs: dict[int, str] = {}
    async with prime.provider.open(prime.new_spec(BOOT_COMMAND, survives=True)) as sandbox:

        async def run(number: int) -> None:
            script = f"echo {number} | tee -a runs; exec head -c 5000 /dev/zero >&2"
            result = await driver.run(["sh", "-c", script], cwd=str(sandbox.root), timeout_seconds=60)
            outputs[number] = result.stdout
            if len(outputs) % 12 == 0:
                service.cut_streams()

        service.cut_next("SendInput", CUTS)  # the boot's too
        async with connect(sandbox, reconnect=SURVIVAL) as driver:
            async with anyio.create_task_group() as tasks:
                for number in range(runs):
                    tasks.start_soon(run, number)
            once = await driver.run(["cat", "runs"], cwd=str(sandbox.root), timeout_seconds=60)
    assert outputs == {number: f"{number}\n" for number in range(runs)}
    assert sorted(map(int, once.stdout.split())) == list(range(runs))


async def test_cut_commands_are_repeated(
    prime: Bench, service: PrimeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prime_sandbox, "RETRY_SECONDS", (0.05, 0.05, 0.05))
    service.cut_next("started", 1)  # in the opening
    async with prime.provider.open(prime.new_spec(survives=True)) as sandbox:
        probe = Probe(sandbox, reopened=True)
        service.cut_next("started", 2)
        # So many that the first command still runs when it is repeated.
        names = [f"file-{number}" for number in range(5000)]
        await sandbox.put(sandbox.root, pack(*[file_entry(name, name.encode()) for name in names]))
        service.cut_next("started", 2)
        listing = await download(sandbox, sandbox.root, prime.scratch / "out.tar")
        assert {name: listing[name][1].decode() for name in names} == {name: name for name in names}
        await probe.ping()
        service.cut_next("started", 2)
        await sandbox.pause()
        assert not await sandbox.is_running()


async def test_a_token_that_expires_is_renewed(prime: Bench, service: PrimeService) -> None:
    async with prime.provider.open(prime.new_spec(survives=True)) as sandbox:
        probe = Probe(sandbox, reopened=True)
        service.expire_tokens()
        await probe.ping()
        service.expire_tokens()
        service.cut_streams()
        await receive_all(sandbox)
        await sandbox.reopen()
        await probe.ping()
        service.expire_tokens()
        await sandbox.put(sandbox.root, pack(file_entry("a", b"1")))


async def test_requests_that_fail_for_a_moment_are_made_again(prime: Bench, service: PrimeService) -> None:
    service.fail_next("create", 502)
    async with prime.provider.open(prime.python_spec(ECHO)) as sandbox:
        service.fail_next("upload", 409, 502)
        await sandbox.put(sandbox.root, pack(file_entry("a", b"1")))
        service.fail_next("SendInput", 503)
        await sandbox.stream.send(b"1\n")
        assert await receive_line(sandbox) == "1"
        listing = await download(sandbox, sandbox.root, prime.scratch / "out.tar")
        assert listing["a"][1] == b"1"
        service.fail_next("delete", 503, 503, 503)


async def test_a_creation_whose_answer_is_lost_creates_one_sandbox(
    prime: Bench, service: PrimeService, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(service.machines)
    service.fail_next("created", 502)
    async with prime.provider.open(prime.new_spec()):
        assert len(service.machines) == before + 1
    # The SDK gives up, and nobody knows the sandbox's id.
    service.fail_next("created", 502, 502, 502)
    with pytest.raises(ProviderUnavailableError, match="Prime does not answer as expected") as raised:
        async with prime.provider.open(prime.new_spec()):
            pass
    assert "502" not in str(raised.value)
    assert any("502" in str(getattr(record, "fields", "")) for record in caplog.records)
    assert len(service.machines) == before + 2
    assert not await prime.resources()


async def test_an_opening_that_is_cancelled_while_the_service_is_slow_leaves_nothing(
    prime: Bench, service: PrimeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "creation_seconds", 1.0)
    with anyio.move_on_after(0.3) as scope:
        async with prime.provider.open(prime.new_spec()):
            pass
    assert scope.cancelled_caught
    assert not await prime.resources()
    async with prime.provider.open(prime.python_spec(ECHO)) as sandbox:
        await sandbox.stream.send(b"1\n")
        assert await receive_line(sandbox) == "1"


async def test_a_sandbox_that_the_service_loses_is_lost_and_the_agent_is_not_blamed(
    prime: Bench, service: PrimeService
) -> None:
    async with prime.provider.open(prime.new_spec(survives=True)) as sandbox:
        (machine,) = service.living(f"{OWNER_LABEL}={prime.owner}")
        service.lose(machine)
        with anyio.fail_after(20):
            assert await receive_all(sandbox) == b""
        assert await sandbox.cause_of_end() is None
        assert not await sandbox.is_running()
        for use in (sandbox.reopen, sandbox.pause, lambda: sandbox.put(sandbox.root, pack())):
            with pytest.raises(SandboxLostError) as raised:
                await use()
            assert not ended_from_inside(raised.value)


async def test_a_key_that_the_service_refuses_is_a_finding(
    service: PrimeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIME_API_KEY", "another")
    service.fail_next("list", 401)
    async with PrimeProvider("key", tmp_path, PrimeOptions()) as provider:
        *_, finding = await provider.check("image")
    assert not finding.ok
    assert "PRIME_API_KEY" in finding.detail


ATTACKS = """
import json, os, signal, socket, sys
found = {}
def attempt(name, act):
    try:
        found[name] = act()
    except OSError as error:
        found[name] = error.strerror
attempt("kill", lambda: os.kill(1, signal.SIGKILL))
attempt("processes", lambda: sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
attempt("keeper", lambda: os.listdir("/tmp"))
attempt("mount", lambda: os.system("mount -t tmpfs none /usr 2>/dev/null") != 0)
attempt("interfaces", lambda: [name for _, name in socket.if_nameindex()])
attempt("capabilities", lambda: [line.split()[1] for line in open("/proc/self/status") if "Cap" in line[:3]])
attempt("network", lambda: socket.create_connection(("192.0.2.1", 80), 1) and True)
print(json.dumps(found), flush=True)
sys.stdin.read()
"""


async def test_an_agent_cannot_end_its_first_process_see_the_keeper_or_reach_a_network(prime: Bench) -> None:
    async with prime.provider.open(prime.python_spec(ATTACKS)) as sandbox:
        found = json.loads(await receive_line(sandbox))
        assert await sandbox.is_running()
    assert found["kill"] is None  # sent, and without effect
    assert found["processes"] == [1]
    assert found["keeper"] == []
    assert found["mount"] is True
    assert found["interfaces"] == ["lo"]
    assert set(found["capabilities"]) == {"0" * 16}
    assert found["network"] == "Network is unreachable"


async def test_an_agent_that_plants_links_gets_no_file_written_outside(prime: Bench) -> None:
    script = "import os; os.symlink('/usr', 'linked'); print('done', flush=True); input()"
    async with prime.provider.open(prime.python_spec(script)) as sandbox:
        assert await receive_line(sandbox) == "done"
        with pytest.raises(BadRequestError, match="cannot unpack"):
            await sandbox.put(sandbox.root, pack(file_entry("linked/planted", b"1")))
