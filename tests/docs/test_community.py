"""The files for those who contribute or report: they agree with the code, and GitHub can read them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from decathlon_mcp import __version__
from tests.docs.pages import REPOSITORY, blocks

TEMPLATES = REPOSITORY / ".github" / "ISSUE_TEMPLATE"
INPUTS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = read_yaml(REPOSITORY / "CITATION.cff")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (__version__, project["license"])
    assert citation["repository-code"] == project["urls"]["Homepage"]
    assert [each["name"] for each in citation["authors"]] == [each["name"] for each in project["authors"]]


@pytest.mark.parametrize("template", sorted(TEMPLATES.glob("*.yml")), ids=lambda path: path.stem)
def test_issue_templates_are_forms(template: Path) -> None:
    form = read_yaml(template)
    if template.stem == "config":
        assert all({"name", "url", "about"} == link.keys() for link in form["contact_links"])
        return
    assert form["name"]
    assert form["description"]
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids)
    for part in form["body"]:
        assert part["type"] in INPUTS
        assert part["attributes"]["label"]


def test_contributing_names_the_commands_of_the_readme() -> None:
    (first, *_) = blocks(REPOSITORY / "CONTRIBUTING.md", "sh")
    assert [line.partition("#")[0].strip() for line in first.text.splitlines()] == ["make demo", "make test"]


def test_paths_in_contributing_exist() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
    paths = [path for path in re.findall(r"`([\w./-]+/[\w./-]+)`", text) if not path.startswith(".venv")]
    assert len(paths) >= 6
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
