"""The pages against what is there: links, code, commands, options, settings, words, messages."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
import yaml

from decathlon_mcp.episodes.state import TRANSITIONS
from decathlon_mcp.grading.attempt import SERVER_METRICS
from decathlon_mcp.grading.signing import PublicKey
from decathlon_mcp.grading.verdict import Status, Verdict
from decathlon_mcp.settings import RewardPolicy
from docs.tables import rewritten
from tests.docs.pages import PAGES, REPOSITORY, anchors, block, blocks, inline, links, rows

DOCS = REPOSITORY / "docs"
PICTURE = DOCS / "images" / "demo.svg"
HOSTS = {"127.0.0.1", "github.com", "www.apache.org", "www.w3.org"}
MACHINE = re.compile(r"(?<![\w.])/(?:tmp|root|home|work|opt/(?!venv|local_servers)|Users)/")
MEASURED = re.compile(
    r"\d\s*(?:ms|µs)\b|\bcalls/s\b|\btimes (?:as )?(?:fast|quick)|\d\s*× (?:less|fast)", re.IGNORECASE
)
READERS: dict[str, Callable[[str], Any]] = {
    "json": json.loads,
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
    "python": lambda text: compile(text, "<page>", "exec"),
}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


@each_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    dead = [link for link in links(page) if not _leads_somewhere(page, link)]
    assert dead == []


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    if "://" in path:
        return True
    target = (page.parent / path) if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


@each_page
def test_every_block_is_what_it_says_it_is(page: Path) -> None:
    for found in blocks(page, *READERS):
        READERS[found.language](found.text)
    for found in blocks(page, "sh", "bash"):
        subprocess.run(["bash", "-n"], input=found.text, text=True, check=True)
    assert not [
        str(found) for found in blocks(page) if found.language not in {*READERS, "sh", "bash", "js", ""}
    ]


@each_page
def test_no_page_leads_to_this_machine_or_to_a_strangers(page: Path) -> None:
    text = page.read_text("utf-8")
    assert MACHINE.search(text) is None
    assert set(re.findall(r"https?://([\w.-]+)", text)) <= HOSTS


@each_page
def test_what_was_measured_stands_beside_the_benchmark_alone(page: Path) -> None:
    assert MEASURED.search(page.read_text("utf-8")) is None


def test_the_readmes_two_commands_are_the_makefiles_and_the_cis() -> None:
    told = block("README.md", "Two commands", "sh").text
    commands = [line.partition("#")[0].strip() for line in told.splitlines()]
    assert commands == ["make demo", "make test"]
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    for command in commands:
        assert re.search(rf"^{command.removeprefix('make ')}:", makefile, re.MULTILINE)
    assert "make test" in (REPOSITORY / ".ci" / "run").read_text("utf-8").splitlines()


def test_what_make_is_told_in_the_pages_it_knows() -> None:
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    told = re.compile(r"\bmake (\w+)((?: [A-Z]+=\S+)*)")
    for page in PAGES:
        code = [found.text for found in blocks(page, "sh")] + [c.content for c in inline(page, "code_inline")]
        for target, variables in told.findall("\n".join(code)):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
            for variable in re.findall(r"([A-Z]+)=", variables):
                assert f"$({variable})" in makefile


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_tables_are_as_the_code_has_them(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text == rewritten(text), "write them anew: python docs/tables.py"


def test_the_verdict_shown_is_one_that_the_key_shown_signed() -> None:
    shown = json.loads(block("docs/rewards.md", "Rewards", "json").text)
    assert Verdict.model_validate(shown).to_json() == shown
    key = block("docs/rewards.md", "Who it is from", "json").text
    PublicKey.read(key.encode()).check(shown)


def test_every_policy_is_told() -> None:
    told = [cells[0].strip("`") for cells in rows(DOCS / "rewards.md", "Who sees it")]
    assert told == list(get_args(RewardPolicy))


def test_every_status_is_told() -> None:
    told = [cells[0].strip("`") for cells in rows(DOCS / "rewards.md", "When there is no reward")]
    assert told == list(get_args(Status))


def test_every_metric_that_the_server_counts_is_told() -> None:
    (section,) = re.findall(
        r"## What the server counts\n(.*?)\n## ", (DOCS / "rewards.md").read_text("utf-8"), re.DOTALL
    )
    assert set(SERVER_METRICS) <= set(re.findall(r"`(\w+)`", section))


def test_phases_are_told_in_their_order() -> None:
    (found,) = (each for each in blocks(DOCS / "concepts.md") if "→" in each.text)
    assert found.text.split("→") == [
        f"{' ' * bool(n)}{phase.name}{' ' * (n < 5)}{chr(10) * (n == 5)}"
        for n, phase in enumerate(TRANSITIONS)
    ]


def test_what_the_readme_says_of_a_client_is_in_its_program() -> None:
    programs = {
        page.stem: "".join(found.text for found in blocks(page, "python", "bash", "js"))
        for page in (DOCS / "clients").glob("*.md")
    }
    told = 0
    for cells in rows(REPOSITORY / "README.md", "Any MCP client"):
        (name,) = re.findall(r"docs/clients/([\w-]+)\.md\)", cells[0])
        for expression in re.findall(r"`([^`]+)`", cells[1]):
            assert _squeezed(expression) in _squeezed(programs[name])
            told += 1
    assert told >= 7


def _squeezed(code: str) -> str:
    """Without what a formatter decides, and open to further arguments."""
    return re.sub(r"[\s,]+", "", code).removesuffix(")")


def test_the_picture_is_whole_and_fetches_nothing() -> None:
    text = PICTURE.read_text("utf-8")
    said = [
        " ".join("".join(line.itertext()).split())
        for line in ElementTree.fromstring(text).iter()
        if line.tag.endswith("}text")
    ]
    assert said[-2:] == ["rewards", "1.0 tune-reactor"] or said[-1].endswith("tune-reactor")
    assert "reward 1.0" in said or "reward1.0" in said
    assert re.findall(r"(?:href|src|url\()", text) == []
