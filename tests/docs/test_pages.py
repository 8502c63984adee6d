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

from decathlon_mcp.episodes.state import TRANSITIONS
from decathlon_mcp.grading.attempt import SERVER_METRICS
from decathlon_mcp.grading.verdict import Status, Verdict
from decathlon_mcp.plugins.credentials import check, read_key
from decathlon_mcp.settings import RewardPolicy
from docs.first_reward import walkthroughs
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
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|root|home|work|opt/(?!venv|local_servers)|Users)/\S*")
BLOCKING = re.compile(r"\S*decathlon-mcp (serve|stdio|play)\b(?!.*--script)")
AUTODOC = re.compile(r"^\.\. auto(class|data|module):: ([\w.]+)$", re.MULTILINE)


def test_relative_links_have_targets() -> None:
    dead = [f"{page.name}: {link}" for page in PAGES for link in links(page) if not _has_target(page, link)]
    assert dead == []


def _has_target(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    if "://" in path:
        return True
    target = (page.parent / path) if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


OWN_WORDS = {
    "lobby": "start\\s+episodes",
    "lease": "without\\s+a\\s+request",
    "provisional": "other\\s+paths",
    "forfeited": "graded?\\b",
}
"""Words of this project, and what their explanation contains."""
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def test_own_words_are_explained_where_a_page_first_uses_them() -> None:
    unexplained: list[str] = []
    for page in PAGES:
        if page.name in ("CHANGELOG.md", "concepts.md"):
            continue
        prose = FENCED.sub("", page.read_text("utf-8"))
        # A row of a table explains its own words.
        passages = re.split(r"\n\n|\n(?=\|)|\n(?=- )", prose)
        for word, explanation in OWN_WORDS.items():
            uses = (each for each in passages if re.search(rf"\b{word}\b", each) and each[0] not in "#<")
            if (first := next(uses, None)) and not re.search(explanation, first):
                unexplained.append(f"{page.name}: {word}: {first.strip()[:100]}")
    assert unexplained == []


def test_code_blocks_are_valid_in_their_language() -> None:
    for found in (found for page in PAGES for found in blocks(page)):
        assert found.language in {*PARSERS, *NOT_PARSED}, found
        try:
            PARSERS.get(found.language, str)(found.text)
        except (ValueError, configparser.Error) as error:
            raise AssertionError(f"{found}: {error}") from error


def test_files_that_the_pages_tell_to_copy_can_be_read() -> None:
    units = list((REPOSITORY / "packaging" / "systemd").iterdir())
    assert len(units) == 2
    for unit in units:
        PARSERS["ini"](unit.read_text("utf-8"))
    PARSERS["yaml"]((REPOSITORY / "packaging" / "cluster" / "kuberay.yaml").read_text("utf-8"))


def test_shell_blocks_are_valid_in_bash() -> None:
    commands = "\n".join(found.text for page in PAGES for found in blocks(page, "sh", "bash"))
    subprocess.run(["bash", "-n"], input=commands, text=True, check=True)


def test_a_command_that_blocks_is_the_last_of_its_block() -> None:
    """A reader pastes a whole block: what follows a server or the player runs only after it has ended."""
    followed = [
        f"{found}: {line}"
        for page in PAGES
        for found in blocks(page, "sh", "bash")
        for line in found.text.strip().replace("\\\n", " ").splitlines()[:-1]
        if BLOCKING.match(line) and not line.rstrip().endswith("&")
    ]
    assert followed == []


def test_pages_name_no_path_of_one_machine() -> None:
    assert [match for page in PAGES for match in MACHINE_PATH.findall(page.read_text("utf-8"))] == []


def test_readme_shows_the_two_commands_that_ci_runs() -> None:
    lines = block("README.md", "Two commands", "sh").text.splitlines()
    clone, *commands = [line.partition("#")[0].strip() for line in lines]
    assert clone.startswith("git clone ")
    assert commands == ["make demo", "make test"]
    assert "run_tests make test" in (REPOSITORY / ".ci" / "run").read_text("utf-8").splitlines()


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


def test_concepts_page_shows_the_phases_in_order() -> None:
    phases = [re.findall(r"\w+", found.text) for found in blocks(DOCS / "concepts.md") if "→" in found.text]
    assert phases == [[phase.name for phase in TRANSITIONS]]


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


def test_the_recording_starts_with_a_full_picture() -> None:
    """Previews show only the first frame. A negative delay starts the animation at that time within it."""
    recording = (DOCS / "images" / "demo.svg").read_text("utf-8")
    appears = {
        name: float(percent)
        for name, percent in re.findall(r"@keyframes l(\d+) .*? ([\d.]+)%, 100% \{ opacity: 1", recording)
    }
    timings = re.findall(r"#l(\d+) \{ animation: l\d+ ([\d.]+)s (-[\d.]+)s infinite", recording)
    assert len(appears) == len(timings) > 30
    for name, duration, delay in timings:
        assert appears[name] / 100 * float(duration) <= -float(delay)


def test_every_step_to_the_first_reward_is_on_its_page() -> None:
    steps = [step for walkthrough in walkthroughs() for step in walkthrough.steps]
    assert all(step.text() for step in steps)


def test_trainers_pages_say_in_which_environment_they_are_installed() -> None:
    for page in ("trainers.md", "verifiers.md"):
        *sections, _ = (DOCS / page).read_text("utf-8").split("```sh\npip install")
        assert sections
        for section in sections:
            assert "environment" in section.rpartition("\n#")[2], (page, section[-200:])
