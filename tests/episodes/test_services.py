"""Services, credentials and the sandboxes that a factory opens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.episodes.beginnings import read_credentials
from decathlon_mcp.episodes.records import SandboxRecords
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.errors import ImageError, SetUpError
from decathlon_mcp.plugins.readiness.suites import probe_suite
from decathlon_mcp.plugins.services import SERVICE_ROOT, Services, open_services
from decathlon_mcp.suites.tasks import Task
from tests.episodes.environment import TOOLS, ended, running_registry, sandbox_factory, suite_with
from tests.fakes.driver import FakeRun, Faults, RunReply
from tests.fakes.provider import FakeMachine, FakeProvider

pytestmark = pytest.mark.anyio

COUNTER = {
    "ports": [7000],
    "available": True,
    "image": "counter-image",
    "start": ["serve"],
    "cure": "build it",
}


def suite_with_service(folder: Path, **service: Any) -> Path:
    """The probe suite; its task `dense` needs this service, named `Counter_1`."""
    return suite_with(folder, services={"Counter_1": service}, tasks={"dense": {"services": ["Counter_1"]}})


@asynccontextmanager
async def services_of(
    tmp_path: Path, provider: FakeProvider, **service: Any
) -> AsyncGenerator[tuple[SandboxFactory, Services]]:
    factory = sandbox_factory(tmp_path, provider, suite=suite_with_service(tmp_path, **service))
    async with provider:
        task = factory.suite.tasks["dense"]
        async with open_services(
            factory, task, "label", start_seconds=5, records=SandboxRecords(None, "label")
        ) as services:
            yield factory, services


async def test_an_external_service_that_does_not_answer_fails_and_names_its_address(tmp_path: Path) -> None:
    with pytest.raises(SetUpError, match=r"the service Counter_1 does not answer at localhost:1$"):
        async with services_of(tmp_path, FakeProvider(), ports={8080: 1}, available=True):
            pass


async def test_a_service_with_an_image_runs_in_a_sandbox_of_its_own(tmp_path: Path) -> None:
    requests: list[FakeRun] = []

    def run(request: FakeRun) -> int:
        requests.append(request)
        return 0

    provider = FakeProvider(run=run)
    async with services_of(tmp_path, provider, **COUNTER) as (_, services):
        (sandbox,) = provider.opened
        assert sandbox.spec.name == "label-counter-1"
        assert (sandbox.spec.image, sandbox.spec.network) == ("counter-image", "none")
        assert sandbox.root == SERVICE_ROOT
        assert [(request.argv, request.cwd) for request in requests] == [(("serve",), "/service")]
        assert requests[0].leave, "the service is what its start command leaves running"
        assert list(services.targets) == [7000]
        assert len(services.drivers) == 1
    assert provider.machine.sandboxes == {}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (RunReply(exit_code=3, stderr="port in use"), r"\(exit code 3\): port in use"),
        (RunReply(exit_code=1, stdout="printed"), r"\(exit code 1\): printed"),
        (RunReply(timed_out=True), r"\(took too long\)"),
    ],
)
async def test_a_service_that_does_not_start_fails_with_its_output(
    tmp_path: Path, reply: RunReply, reason: str
) -> None:
    provider = FakeProvider(run=lambda request: reply)
    with pytest.raises(SetUpError, match=f"the service Counter_1 did not start {reason}"):
        async with services_of(tmp_path, provider, **COUNTER):
            pass
    assert provider.machine.sandboxes == {}


@pytest.mark.parametrize(("cure", "explanation"), [("build it", ": build it"), ("", r" \(no such image\)")])
async def test_a_service_without_its_image_fails_and_says_how_to_get_it(
    tmp_path: Path, cure: str, explanation: str
) -> None:
    provider = FakeProvider(faults=Faults(open_error=ImageError("no such image")))
    with pytest.raises(SetUpError, match=f"no image counter-image for the service Counter_1{explanation}"):
        async with services_of(tmp_path, provider, **{**COUNTER, "cure": cure}):
            pass


async def test_a_provider_without_containers_cannot_run_a_service(tmp_path: Path) -> None:
    with pytest.raises(SetUpError, match="the service Counter_1 needs a container"):
        async with services_of(tmp_path, FakeProvider(isolation="none"), **COUNTER):
            pass


async def test_an_episode_that_loses_a_service_is_lost_too(tmp_path: Path) -> None:
    suite, provider = suite_with_service(tmp_path, **{**COUNTER, "ports": []}), FakeProvider(tools=TOOLS)
    async with running_registry(tmp_path, provider, suite=suite) as registry:
        episode = registry.start("dense", Principal())
        await episode.ready()
        service, agent = provider.opened
        assert [sandbox.spec.name.rpartition("-")[2] for sandbox in (service, agent)] == ["1", "agent"]
        await service.lose()
        await ended(episode)
        assert episode.state.ending is Ending.SANDBOX_LOST


async def test_a_service_outlives_the_agents_sandbox_until_the_grading_is_done(tmp_path: Path) -> None:
    suite = suite_with_service(tmp_path, **{**COUNTER, "ports": []})
    machine, open_sandboxes = FakeMachine(), list[list[str]]()

    def run(request: FakeRun) -> RunReply:
        open_sandboxes.append([name.rpartition("-")[2] for name in machine.sandboxes])
        return RunReply(channel="{}")

    provider = FakeProvider(tools=TOOLS, run=run, machine=machine)
    async with running_registry(tmp_path, provider, suite=suite) as registry:
        await registry.start("dense", Principal()).evaluate()
    # In each grader's sandbox, the module is checked before it runs.
    start, *graders = open_sandboxes
    assert start == ["1"]
    assert graders == [["1", "grader1"]] * 2 + [["1", "grader2"]] * 2


async def test_credentials_outside_of_the_suite_need_a_container(tmp_path: Path) -> None:
    suite = suite_with(
        tmp_path,
        accounts={"shop": {"tasks": ["dense"], "slots": {"one": {"files": {"/etc/shop.key": "shop.key"}}}}},
    )
    (suite / "shop.key").write_text("secret")
    slots = {"shop": "one"}
    local = sandbox_factory(tmp_path, FakeProvider(isolation="none"), suite=suite)
    with pytest.raises(SetUpError, match="the task's credentials go to paths outside of the suite"):
        await read_credentials(local, local.suite.tasks["dense"], slots)
    contained = sandbox_factory(tmp_path, FakeProvider(), suite=suite)
    ((folder, _),) = await read_credentials(contained, contained.suite.tasks["dense"], slots)
    assert folder.is_absolute()


@pytest.mark.parametrize(
    ("setting", "agent", "grader"),
    [("auto", "none", "outbound"), ("none", "none", "none"), ("outbound", "outbound", "outbound")],
)
def test_the_network_of_agent_and_grader_is_decided_separately(
    tmp_path: Path, setting: str, agent: str, grader: str
) -> None:
    factory = sandbox_factory(
        tmp_path,
        FakeProvider(),
        suite=suite_with(tmp_path, tasks={"dense": {"grader_network": True}}),
        network=setting,
    )
    task: Task = factory.suite.tasks["dense"]
    assert (factory.network_for(task), factory.grader_network_for(task)) == (agent, grader)


async def test_the_probe_runs_in_a_sandbox_without_a_network(tmp_path: Path) -> None:
    provider = FakeProvider(run=lambda request: RunReply(stdout="{}"))
    async with provider:
        factory = sandbox_factory(tmp_path, provider)
        catalogue = Catalogue([factory.suite])
        findings = [found async for found in probe_suite(factory, catalogue, can_open=True)]
        (sandbox,) = provider.opened
        assert PurePosixPath(sandbox.root / "configs") in sandbox.tree
    assert [found.what for found in findings if not found.ok] == []
    assert sandbox.spec.network == "none"
