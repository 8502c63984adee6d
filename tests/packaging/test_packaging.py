"""The bundle's manifest and the registry's file agree with the command line and the version."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.cli.command_line import command_line

REPOSITORY = Path(__file__).parents[2]
MANIFEST = json.loads((REPOSITORY / "packaging" / "bundle" / "manifest.json").read_text("utf-8"))
REGISTRY = json.loads((REPOSITORY / "server.json").read_text("utf-8"))


def _registry_arguments() -> list[str]:
    (package,) = REGISTRY["packages"]
    arguments: list[str] = []
    for argument in package["packageArguments"]:
        value: Any = argument.get("value") or argument.get("default") or argument.get("placeholder")
        arguments += [argument["name"], value] if argument["type"] == "named" else [value]
    return arguments


def _bundle_arguments() -> list[str]:
    arguments = MANIFEST["server"]["mcp_config"]["args"]
    values = {"${user_config.url}": MANIFEST["user_config"]["url"]["default"]}
    return [values.get(argument, argument) for argument in arguments[arguments.index("stdio") :]]


@pytest.mark.parametrize(
    "arguments", [_registry_arguments(), _bundle_arguments()], ids=["registry", "bundle"]
)
def test_the_command_accepts_the_listed_arguments(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DECATHLON_URL", raising=False)
    command_line().parse_args(arguments, exit_on_error=False, print_error=False)


def test_the_bundles_entry_point_exists() -> None:
    server = MANIFEST["server"]
    assert server["entry_point"] in server["mcp_config"]["args"]
    assert (REPOSITORY / "packaging" / "bundle" / server["entry_point"]).is_file()


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_every_package_is_pinned_with_hashes_and_no_index_is_named(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    packages = [line for line in text.splitlines() if line[:1].isalnum()]
    assert packages
    for package in packages:
        assert re.match(r"[a-z0-9.-]+==\S+", package), package
        assert package.endswith(" \\"), f"{package} has no hash"
    assert not re.search(r"://|--index|--find-links|-f ", text)
