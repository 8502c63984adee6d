"""What the bundle and the registry are told, against what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp import __version__
from decathlon_mcp.cli.app import app

REPOSITORY = Path(__file__).parents[2]
MANIFEST = json.loads((REPOSITORY / "packaging" / "bundle" / "manifest.json").read_text("utf-8"))
REGISTRY = json.loads((REPOSITORY / "server.json").read_text("utf-8"))


def _of_registry() -> list[str]:
    (package,) = REGISTRY["packages"]
    words: list[str] = []
    for argument in package["packageArguments"]:
        given: Any = argument.get("value") or argument.get("default") or argument.get("placeholder")
        words += [argument["name"], given] if argument["type"] == "named" else [given]
    return words


def _of_bundle() -> list[str]:
    words = MANIFEST["server"]["mcp_config"]["args"]
    filled = {"${user_config.url}": MANIFEST["user_config"]["url"]["default"]}
    return [filled.get(word, word) for word in words[words.index("stdio") :]]


def test_both_are_of_this_version() -> None:
    (package,) = REGISTRY["packages"]
    assert {MANIFEST["version"], REGISTRY["version"], package["version"]} == {__version__}
    assert package["runtimeArguments"][0]["value"].endswith(f"=={__version__}")


@pytest.mark.parametrize("words", [_of_registry(), _of_bundle()], ids=["registry", "bundle"])
def test_what_they_start_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DECATHLON_URL", raising=False)
    app.parse_args(words, exit_on_error=False, print_error=False)


def test_the_bundle_starts_what_it_holds() -> None:
    server = MANIFEST["server"]
    assert server["entry_point"] in server["mcp_config"]["args"]
    assert (REPOSITORY / "packaging" / "bundle" / server["entry_point"]).is_file()
