"""Tasks as folders for Harbor (harborframework.com): a sidecar holds the episode, a verifier its verdict.

    TASK/instruction.md               the prompt
         task.toml                    the MCP server that agents get; how the verdict leaves the sidecar
         environment/                 compose: the agent's container `main`, and the sidecar `decathlon`
         tests/                       the verifier's image: the signature is checked, the reward written
         solution/                    for bundled tasks: the calls that solve it, for Harbor's agent `oracle`

The agent reaches the sidecar at one address, where the episode can only be played. Harbor stops the agent's
container, and then runs `decathlon-mcp episode verdict` in the sidecar. Tried with Harbor 0.26.0, schema 1.4.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from decathlon_mcp.app import image_for, provider_for
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.payloads import source
from decathlon_mcp.plugins.docker.container import nesting_profile
from decathlon_mcp.settings import Settings, all_settings
from decathlon_mcp.starter import oracle, oracle_ids, suite_path
from decathlon_mcp.storage.keys import key_file_content
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

SERVICE, SERVER = "decathlon", "task"
"""Names of the sidecar, and of the episode's MCP server."""
ADDRESS = f"http://{SERVICE}:8765/mcp"
STATE = "/state"
VERDICT = f"{STATE}/verdict.json"
PASSED_ON = ("language", "names")
"""Settings on which the prompt depends."""
MARGIN_SECONDS = 120
"""Added to our own time limits, so that these apply, with their messages, and not Harbor's."""
ENGINE = "/var/run/docker.sock"

INSTRUCTION = """{prompt}

Everything that this task names, its folder included, is reached with the tools of the MCP server `{server}`.
Nothing of it is in this container.
"""
# Its health is not a server's. NONE instead would make `docker compose up --wait` fail.
DOCKERFILE = """FROM {image}
COPY test.sh key.json /tests/
ENTRYPOINT []
HEALTHCHECK --interval=2s CMD ["true"]
WORKDIR /
"""
TEST = f"""#!/bin/sh
# Writes the reward of the sidecar's verdict if its signature is right. A verdict without a reward is not
# a zero: this fails then, and Harbor reports an error.
set -eu
decathlon-mcp verify {VERDICT} --key /tests/key.json
reward=$(python3 -c 'import json; print(json.load(open("{VERDICT}"))["reward"])')
echo "$reward" >/logs/verifier/reward.txt
"""
SOLUTION = f"""#!/bin/sh
exec python3 /solution/play.py {ADDRESS} /solution/calls.jsonl
"""


@dataclass(frozen=True, slots=True)
class HarborOptions:
    """Images, and limits in seconds. `server_image`: of the sidecar and the verifier.

    `agent_seconds`: what an attempt may take.
    """

    agent_image: str
    server_image: str
    agent_seconds: float


def write_harbor_tasks(
    catalogue: Catalogue, names: Iterable[str], settings: Settings, options: HarborOptions, out: Path
) -> None:
    """Write these tasks into a folder, each with a key of its own.

    Raises BadRequestError for a suite whose sandboxes no sidecar can open, SuiteError.
    """
    launch_time = datetime.now().astimezone().replace(microsecond=0)
    for name in names:
        suite, task = catalogue.find(name)
        folder = out / name.replace(":", "__")
        for path, text in _files(catalogue, suite, task, launch_time, settings, options):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, "utf-8")


def _files(
    catalogue: Catalogue,
    suite: Suite,
    task: Task,
    launch_time: datetime,
    settings: Settings,
    options: HarborOptions,
) -> Iterator[tuple[str, str]]:
    """The files of a task, by their paths in its folder."""
    key = Ed25519PrivateKey.generate()
    prompt = catalogue.prompt(suite, task, launch_time).instructions
    yield "instruction.md", INSTRUCTION.format(prompt=prompt.rstrip(), server=SERVER)
    yield "task.toml", _task_toml(suite, task, settings, options)
    sidecar = _sidecar(suite, task, launch_time, settings, options)
    sidecar["environment"]["SIGNING_KEY"] = key_file_content(key).decode()
    yield "environment/docker-compose.yaml", _compose(sidecar)
    yield "environment/seccomp.json", f"{nesting_profile()}\n"
    yield "tests/Dockerfile", DOCKERFILE.format(image=options.server_image)
    yield "tests/test.sh", TEST
    yield "tests/key.json", f"{json.dumps(Signer(key).public.to_json())}\n"
    if _is_bundled(suite) and task.id in oracle_ids():
        workspace = str(suite.profile.root / "workspace")
        calls = [{"name": step.tool, "arguments": step.resolve(workspace)} for step in oracle(task.id)]
        yield "solution/solve.sh", SOLUTION
        yield "solution/play.py", source("script_player", "decathlon_mcp.plugins.exports")
        yield "solution/calls.jsonl", "".join(f"{json.dumps(call)}\n" for call in calls)


def _task_toml(suite: Suite, task: Task, settings: Settings, options: HarborOptions) -> str:
    collected = f"decathlon-mcp episode verdict >{VERDICT} || [ $? = 4 ]"
    needs = (*task.needs.servers, *task.needs.local_tools, *(["network"] if task.needs.network else []))
    tables: list[tuple[str, JsonObject]] = [
        ("[metadata]", {
            "suite": suite.name, "revision": suite.revision, "splits": [*task.splits], "needs": [*needs],
        }),
        ("[agent]", {"timeout_sec": float(options.agent_seconds)}),
        ("[environment]", {
            "docker_image": options.agent_image,
            # The sidecar is healthy, and the environment complete, once the episode can be played.
            "build_timeout_sec": settings.set_up_seconds + 5.0 * MARGIN_SECONDS,
        }),
        ("[[environment.mcp_servers]]", {"name": SERVER, "transport": "streamable-http", "url": ADDRESS}),
        ("[verifier]", {"environment_mode": "separate", "timeout_sec": float(MARGIN_SECONDS)}),
        ("[[verifier.collect]]", {
            "service": SERVICE,
            # 4: the attempt did not pass.
            "command": collected,
            "timeout_sec": float(settings.evaluation_seconds + MARGIN_SECONDS),
        }),
    ]  # fmt: skip
    lines = [
        'schema_version = "1.4"',
        f'artifacts = [{{ source = "{VERDICT}", service = "{SERVICE}" }}]',
    ]
    for heading, values in tables:
        lines += ["", heading, *(f"{name} = {_toml(value)}" for name, value in values.items())]
    return "".join(f"{line}\n" for line in lines)


def _toml(value: object) -> str:
    # Strings, numbers and lists of JSON are also TOML, but for surrogates of characters beyond 16 bits.
    return json.dumps(value, ensure_ascii=False)


def _sidecar(
    suite: Suite, task: Task, launch_time: datetime, settings: Settings, options: HarborOptions
) -> JsonObject:
    """The service that holds the episode, as compose describes it. Raises BadRequestError, SettingsError."""
    provider = provider_for(suite, settings)
    if provider not in ("host", "docker"):
        raise BadRequestError(
            f"tasks of {suite.name} run with --provider {provider}, which a sidecar cannot: choose host or "
            "docker"
        )
    if provider == "host" and (image_for(suite, settings) is not None or settings.kernel is not None):
        raise BadRequestError(f"tasks of {suite.name} have an unpacked image, which a sidecar does not have")
    environment: JsonObject = {
        f"DECATHLON_{name.upper()}": value
        for name in PASSED_ON
        if (value := getattr(settings, name)) != all_settings().model_fields[name].default
    }
    volumes: list[str] = []
    if not _is_bundled(suite):
        mounted = f"/suites/{suite.path.name}"
        volumes.append(f"{suite.path.absolute()}:{mounted}:ro".replace("$", "$$"))
        environment["DECATHLON_SUITE"] = mounted
    service: JsonObject = {
        "image": options.server_image,
        "command": [
            *("serve-episode", task.id, "--launch-time", launch_time.isoformat()),
            # Harbor's own limit comes first.
            *("--player-seconds", f"{settings.episode_seconds:g}", "--allowed-host", SERVICE),
        ],
        "environment": environment,
        "networks": ["default"],
        "healthcheck": {
            # The socket of `episode verdict`, which is there once the episode can be played.
            "test": ["CMD", "test", "-S", f"{STATE}/episode.sock"],
            "interval": "2s",
            "start_period": f"{settings.set_up_seconds + MARGIN_SECONDS:g}s",
        },
        "stop_grace_period": "30s",
    }
    if provider == "docker":
        # Who may use the engine's socket is root there anyway.
        service["user"] = "0"
        volumes.append(f"{ENGINE}:{ENGINE}")
        environment |= {"DECATHLON_PROVIDER": "docker", "DECATHLON_IMAGE": image_for(suite, settings)}
    else:
        service["security_opt"] = [*("seccomp:seccomp.json", "systempaths=unconfined", "apparmor=unconfined")]
    return {**service, **({"volumes": volumes} if volumes else {})}


def _compose(sidecar: JsonObject) -> str:
    main = {"depends_on": {SERVICE: {"condition": "service_healthy"}}}
    document = {"services": {"main": main, SERVICE: sidecar}}
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10_000)


def _is_bundled(suite: Suite) -> bool:
    return suite.path.resolve() == suite_path()
