"""The pages against the code and the repository: links, code blocks, make targets, tables, quoted values."""

from __future__ import annotations

import configparser
import json
import pkgutil
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import decathlon_client
import yaml

from decathlon_mcp.grading.attempt import SERVER_METRICS
from decathlon_mcp.grading.verdict import Status, Verdict
from decathlon_mcp.plugins.credentials import check, read_key
from decathlon_mcp.settings import RewardPolicy
from docs.first_reward import walkthroughs
from docs.llms import llms_txt, pages
from docs.tables import with_tables
from tests.docs.pages import DOCS, PAGES, REPOSITORY, anchor, anchors, block, blocks, inline_code, links, rows

MAKEFILE = REPOSITORY / "Makefile"
REWARDS = DOCS / "rewards.md"
PARSERS: dict[str, Callable[[str], Any]] = {
    "json": json.loads,
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
    "ini": lambda text: configparser.ConfigParser(interpolation=None).read_string(text),
    "python": lambda text: compile(text, "<page>", "exec"),
}
NOT_PARSED = {"", "js", "sh", "bash", "{eval-rst}"}
MOST_WORDS = 45_000
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|root|home|work|opt/(?!venv|local_servers)|Users)/\S*")
AUTODOC = re.compile(r"^\.\. auto(class|data|module):: ([\w.]+)$", re.MULTILINE)


def test_the_pages_without_results_have_at_most_45_000_words() -> None:
    """Words as `cat docs/*.md docs/reference/*.md | wc -w` counts them; measurements are in docs/results."""
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name != "results"]
    words = {page.name: len(page.read_text("utf-8").split()) for page in pages}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])


def test_relative_links_have_targets() -> None:
    dead = [f"{page.name}: {link}" for page in PAGES for link in links(page) if not _has_target(page, link)]
    assert dead == []


def _has_target(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    if "://" in path:
        return True
    target = (page.parent / path) if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def test_code_blocks_are_valid_in_their_language() -> None:
    for found in (found for page in PAGES for found in blocks(page)):
        assert found.language in {*PARSERS, *NOT_PARSED}, found
        try:
            PARSERS.get(found.language, str)(found.text)
        except (ValueError, configparser.Error) as error:
            raise AssertionError(f"{found}: {error}") from error


def test_files_that_the_pages_tell_to_copy_can_be_read() -> None:
    for unit in (REPOSITORY / "packaging" / "systemd").iterdir():
        PARSERS["ini"](unit.read_text("utf-8"))
    PARSERS["yaml"]((REPOSITORY / "packaging" / "cluster" / "kuberay.yaml").read_text("utf-8"))


def test_shell_blocks_are_valid_in_bash() -> None:
    commands = "\n".join(found.text for page in PAGES for found in blocks(page, "sh", "bash"))
    subprocess.run(["bash", "-n"], input=commands, text=True, check=True)


def test_pages_name_no_path_of_one_machine() -> None:
    assert [match for page in PAGES for match in MACHINE_PATH.findall(page.read_text("utf-8"))] == []


def test_make_targets_and_variables_on_the_pages_exist() -> None:
    makefile = MAKEFILE.read_text("utf-8")
    code = [text for page in PAGES for text in (*inline_code(page), *(b.text for b in blocks(page, "sh")))]
    commands = re.findall(r"\bmake (\w+)((?: [A-Z]+=\S+)*)", "\n".join(code))
    assert {"demo", "test"} <= {target for target, _ in commands}
    assert [t for t, _ in commands if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []
    variables = {name for _, words in commands for name in re.findall(r"([A-Z]+)=", words)}
    assert [name for name in variables if f"$({name})" not in makefile] == []


def test_generated_tables_are_up_to_date() -> None:
    texts = {page.name: page.read_text("utf-8") for page in DOCS.rglob("*.md")}
    outdated = [name for name, text in texts.items() if with_tables(text) != text]
    assert outdated == [], "update them with: python docs/tables.py"


def test_reference_pages_document_the_whole_client() -> None:
    text = "".join((DOCS / "reference" / page).read_text("utf-8") for page in ("client.md", "errors.md"))
    documented: set[str] = set()
    for kind, target in AUTODOC.findall(text):
        subject: object = pkgutil.resolve_name(target)  # raises for a name that does not exist
        documented |= set(vars(subject)) if kind == "module" else {target.rpartition(".")[2]}
    assert set(decathlon_client.__all__) <= documented


def test_example_verdict_is_signed_by_the_example_key() -> None:
    verdict = json.loads(block("docs/rewards.md", "Rewards", "json").text)
    assert Verdict.model_validate(verdict).to_json() == verdict
    key = block("docs/rewards.md", "Who it is from", "json").text
    check(read_key(key.encode()), verdict)


def test_rewards_page_lists_every_policy_status_and_metric() -> None:
    policies = [cells[0].strip("`") for cells in rows(REWARDS, "Who sees it")]
    statuses = [cells[0].strip("`") for cells in rows(REWARDS, "Zero, and no reward")]
    assert (policies, statuses) == (list(get_args(RewardPolicy)), list(get_args(Status)))
    _, _, section = REWARDS.read_text("utf-8").partition("## What the server counts\n")
    assert set(SERVER_METRICS) <= set(re.findall(r"`(\w+)`", section.partition("\n## ")[0]))


def test_the_table_of_clients_lists_every_program() -> None:
    page = DOCS / "clients.md"
    links_of_table = re.findall(r"\]\(#([\w-]+)\)", "".join(cells[0] for cells in rows(page, "Clients")))
    with_program = [found.heading for found in blocks(page, "python", "js", "bash")]
    assert sorted(links_of_table) == sorted(map(anchor, with_program))


def test_pictures_and_site_files_load_nothing_remote() -> None:
    pictures = [file.read_text("utf-8") for file in (DOCS / "images").glob("*.svg")]
    assert [match for text in pictures for match in re.findall(r"(?:href|src)=|url\((?!#)", text)] == []
    files = [file.read_text("utf-8") for file in (DOCS / "site").iterdir()]
    assert [match for text in files for match in re.findall(r"https?://|@import", text)] == []


def test_every_step_to_the_first_reward_is_on_its_page() -> None:
    steps = [step for walkthrough in walkthroughs() for step in walkthrough.steps]
    assert all(step.text() for step in steps)


def test_paths_in_contributing_exist() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
    paths = [path for path in re.findall(r"`([\w./-]+/[\w./-]+)`", text) if not path.startswith(".venv")]
    assert len(paths) >= 6
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_the_texts_for_models_are_current_and_name_every_page() -> None:
    assert (REPOSITORY / "llms.txt").read_text("utf-8") == llms_txt(), "write it with: python docs/llms.py"
    for page in pages():
        assert page.name == "README.md" or f"]({page.relative_to(REPOSITORY)}): " in llms_txt()
