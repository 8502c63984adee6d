"""`export --to harbor`: what the folders have. `tests/trainers/harbor.py` has them played by Harbor."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from decathlon_mcp.cli.command_line import run
from decathlon_mcp.grading.signing import PublicKey, Signer
from decathlon_mcp.grading.verdict import Outcome, build_verdict
from decathlon_mcp.plugins.credentials import check, read_key
from decathlon_mcp.starter import copy_template, oracle_ids
from tests.grading.support import make_attempt


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECATHLON_STATE", str(tmp_path / "state"))


def sidecar(task: Path) -> dict[str, Any]:
    """The service that holds the episode."""
    document = yaml.safe_load((task / "environment" / "docker-compose.yaml").read_text("utf-8"))
    assert document["services"]["main"] == {"depends_on": {"decathlon": {"condition": "service_healthy"}}}
    return document["services"]["decathlon"]


def signer(task: Path) -> Signer:
    key = load_pem_private_key(sidecar(task)["environment"]["SIGNING_KEY"].encode(), password=None)
    assert isinstance(key, Ed25519PrivateKey)
    return Signer(key)


def public_key(task: Path) -> PublicKey:
    return read_key((task / "tests" / "key.json").read_bytes())


def test_each_task_is_a_folder_with_a_key_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = "export --to harbor --server-image registry.example/decathlon:1 --output"
    assert run([*words.split(), str(out)]) == 0
    assert capsys.readouterr().err == f"decathlon-mcp: {len(oracle_ids())} tasks in {out}\n"
    assert sorted(folder.name for folder in out.iterdir()) == oracle_ids()
    assert len({public_key(task).id for task in out.iterdir()}) == len(oracle_ids())

    task = out / "find-rate-regression"
    verdict = build_verdict(make_attempt(), Outcome(status="scored", success=True, reward=1.0))
    check(public_key(task), signer(task).sign(verdict).to_json())
    service = sidecar(task)
    assert service["image"] == "registry.example/decathlon:1"
    assert service["command"][:2] == ["serve-episode", "find-rate-regression"]
    assert not {"volumes", "ports", "user"} & service.keys()
    # Nothing of the other files lies where a framework could show it to the agent.
    assert {path.name for path in (task / "environment").iterdir()} == {
        "docker-compose.yaml",
        "seccomp.json",
    }
    config = tomllib.loads((task / "task.toml").read_text("utf-8"))
    assert config["environment"]["mcp_servers"] == [
        {"name": "task", "transport": "streamable-http", "url": "http://decathlon:8765/mcp"}
    ]
    assert config["verifier"]["environment_mode"] == "separate"
    assert config["verifier"]["collect"][0]["service"] == "decathlon"
    launch_time = service["command"][service["command"].index("--launch-time") + 1]
    instruction = (task / "instruction.md").read_text("utf-8")
    assert launch_time[:19].replace("T", " ") in instruction
    calls = [json.loads(line) for line in (task / "solution" / "calls.jsonl").read_text("utf-8").splitlines()]
    assert calls[1]["arguments"]["repo_path"] == "/episode/workspace/repository"
    assert calls[-1]["name"] == "claim_done"


def test_a_suite_of_ones_own_is_mounted_and_played_by_the_engine_if_it_is_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_template(tmp_path / "shop")
    line = ["export", "--to", "harbor", "--suite", str(tmp_path / "shop"), "--language", "en"]
    assert run([*line, "--output", str(tmp_path / "local"), "--provider", "host"]) == 0
    service = sidecar(tmp_path / "local" / "restock-shop")
    assert service["volumes"] == [f"{tmp_path}/shop:/suites/shop:ro"]
    assert service["environment"]["DECATHLON_SUITE"] == "/suites/shop"
    assert "seccomp:seccomp.json" in service["security_opt"]
    assert not (tmp_path / "local" / "restock-shop" / "solution").exists()

    options = ["--provider", "docker", "--image", "toolathlon:1", "--names", "toolathlon"]
    assert run([*line, "--output", str(tmp_path / "engine"), *options]) == 0
    service = sidecar(tmp_path / "engine" / "restock-shop")
    assert service["volumes"][1] == "/var/run/docker.sock:/var/run/docker.sock"
    assert service["user"] == "0"
    assert "security_opt" not in service
    environment = service["environment"]
    assert environment["DECATHLON_PROVIDER"] == "docker"
    assert environment["DECATHLON_IMAGE"] == "toolathlon:1"
    assert environment["DECATHLON_NAMES"] == "toolathlon"
    assert "DECATHLON_LANGUAGE" not in environment

    assert run([*line, "--output", str(tmp_path / "folder"), "--provider", "prime"]) == 1
    assert "which a sidecar cannot: choose host or docker" in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()
