"""The container image of the server: built on the tests' base, run as its page says, and played on."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx2
import pytest
import yaml
from decathlon_client import Decathlon

from decathlon_mcp.cli.command_line import run

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.docker,
    pytest.mark.long,  # for the sake of the image's build
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).parents[2]
IMAGE = "decathlon-mcp:test"
RECIPE = '{"temperature": 60, "catalyst": 4, "minutes": 56, "product_percent": 72.03, "peak_heat_kw": 10.66}'


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(("docker", *arguments), check=check, capture_output=True, text=True)


@pytest.fixture(scope="module")
def container_image(test_image: str) -> str:
    arguments = ["--network", "host", "--force-rm", "--build-arg", f"BASE={test_image}"]
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        if name in os.environ:
            arguments += ["--build-arg", name]
    built = docker(
        "build", *arguments, "--file", f"{ROOT}/packaging/container/Dockerfile", "--tag", IMAGE, str(ROOT),
        check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return IMAGE


@pytest.fixture(scope="module")
def profile(container_image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("container") / "seccomp.json"
    file.write_text(docker("run", "--rm", container_image, "seccomp").stdout, "utf-8")
    return file


@pytest.fixture
def volume() -> Iterator[str]:
    name = f"decathlon-test-{secrets.token_hex(4)}"
    yield name
    docker("volume", "rm", "--force", name)


def start(image: str, profile: Path, volume: str) -> str:
    """Start the server as the page says, on a free port; return the container's id."""
    return docker(
        "run", "--detach", "--publish", "127.0.0.1::8765", "--volume", f"{volume}:/state",
        "--env", "METRICS_TOKEN=/metrics/token",
        "--security-opt", f"seccomp={profile}", "--security-opt", "systempaths=unconfined", image,
    ).stdout.strip()  # fmt: skip


async def address(container: str) -> str:
    """The server's URL, once it answers."""
    port = docker("port", container, "8765").stdout.strip().rpartition(":")[2]
    url = f"http://127.0.0.1:{port}"
    async with httpx2.AsyncClient(trust_env=False) as http:
        with anyio.fail_after(120):
            while True:
                try:
                    await http.get(f"{url}/healthz")
                except httpx2.TransportError:
                    state = json.loads(docker("inspect", container).stdout)[0]["State"]
                    assert state["Running"], docker("logs", container).stderr
                    await anyio.sleep(0.2)
                else:
                    return url


def test_without_namespaces_it_names_the_options(container_image: str) -> None:
    refused = docker("run", "--rm", container_image, check=False)
    assert refused.returncode == 1
    assert "--security-opt seccomp=FILE --security-opt systempaths=unconfined" in refused.stderr
    assert "token" not in refused.stderr


async def test_a_task_is_played_and_the_token_outlives_the_container(
    container_image: str, profile: Path, volume: str
) -> None:
    container = start(container_image, profile, volume)
    try:
        url = await address(container)
        async with httpx2.AsyncClient(trust_env=False) as http:
            assert (await http.post(f"{url}/mcp", json={})).status_code == 401
            metrics = docker("exec", container, "cat", "/metrics/token").stdout.strip()
            reply = await http.get(f"{url}/metrics", headers={"Authorization": f"Bearer {metrics}"})
            assert "decathlon_info" in reply.text
        token = docker("exec", container, "cat", "/state/token").stdout.strip()
        assert token not in docker("logs", container).stderr
        async with Decathlon(url, token=token) as d, d.episode("tune-reactor") as e:
            await e.call("files__write_file", {"path": "recipe.json", "text": RECIPE})
            assert (await e.evaluate()).reward == 1.0
        docker("stop", "--time", "60", container)
        assert json.loads(docker("inspect", container).stdout)[0]["State"]["ExitCode"] == 0
    finally:
        docker("rm", "--force", container)

    container = start(container_image, profile, volume)
    try:
        url = await address(container)
        async with Decathlon(url, token=token) as d:
            assert "tune-reactor" in {task.id for task in await d.tasks()}
    finally:
        docker("rm", "--force", container)


@pytest.fixture
def network() -> Iterator[str]:
    name = f"decathlon-test-{secrets.token_hex(4)}"
    docker("network", "create", name)
    yield name
    docker("network", "rm", name)


def test_an_exported_task_is_played_beside_its_sidecar_and_only_its_verdict_is_rewarded(
    container_image: str, test_image: str, network: str, tmp_path: Path
) -> None:
    export = ("export", "--to", "harbor", "--output", str(tmp_path / "out"), "--search", "reactor")
    assert run([*export, "--server-image", container_image]) == 0
    task = tmp_path / "out" / "tune-reactor"
    service = yaml.safe_load((task / "environment" / "docker-compose.yaml").read_text())["services"][
        "decathlon"
    ]
    hook = tomllib.loads((task / "task.toml").read_text())["verifier"]["collect"][0]["command"]
    security = [f"--security-opt={option}" for option in service["security_opt"]]
    security[0] = f"--security-opt=seccomp={task}/environment/seccomp.json"
    key = service["environment"]["SIGNING_KEY"]
    sidecar = docker(
        "run", "--detach", "--network", network, "--network-alias", "decathlon", *security,
        "--env", f"SIGNING_KEY={key}", service["image"], *service["command"],
    ).stdout.strip()  # fmt: skip
    verifier = docker("build", "--quiet", "--force-rm", str(task / "tests")).stdout.strip()

    def reward_of(verdict: str) -> str:
        """What the verifier writes for it; empty if it refuses."""
        (tmp_path / "verdict.json").write_text(verdict)
        container = docker("create", "--user", "0", verifier, "sh", "-c", "mkdir -p /logs/verifier; "
                           "sh /tests/test.sh >&2; cat /logs/verifier/reward.txt").stdout.strip()  # fmt: skip
        try:
            docker("cp", str(tmp_path / "verdict.json"), f"{container}:/state/verdict.json")
            return docker("start", "--attach", container, check=False).stdout.strip()
        finally:
            docker("rm", "--force", "--volumes", container)

    try:
        deadline = time.monotonic() + 120
        while docker("exec", sidecar, *service["healthcheck"]["test"][1:], check=False).returncode:
            assert json.loads(docker("inspect", sidecar).stdout)[0]["State"]["Running"], docker(
                "logs", sidecar
            )
            assert time.monotonic() < deadline
            time.sleep(0.2)
        docker("run", "--rm", "--network", network, "--volume", f"{task}/solution:/solution:ro", test_image,
               "sh", "/solution/solve.sh")  # fmt: skip
        docker("exec", sidecar, "sh", "-c", hook)
        verdict = docker("exec", sidecar, "cat", "/state/verdict.json").stdout
        assert key not in docker("exec", sidecar, "cat", "/proc/1/environ").stdout
        assert reward_of(verdict) == "1.0"
        assert reward_of(verdict.replace('"tools_used": 4', '"tools_used": 5')) == ""
        assert reward_of("") == ""
        docker("stop", "--time", "60", sidecar)
    finally:
        docker("rm", "--force", "--volumes", sidecar)
        docker("rmi", "--force", verifier)
