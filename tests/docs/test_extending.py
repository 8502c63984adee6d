"""The skeletons of docs/extending.md, installed as packages, and the program of docs/debugging.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.starter import copy_template, suite_path
from tests.docs.clients import Client
from tests.docs.pages import REPOSITORY, below, block

PAGE = "docs/extending.md"
SECONDS = 120.0
ORACLE = suite_path().parent / "oracles" / "tune-reactor.jsonl"


def install(project: Path, site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, *offline, "--target", str(site), str(project)], check=True)


def run(arguments: Sequence[str | Path], site: Path, folder: Path) -> str:
    """The output of Python with the packages in `site`, and without settings from outside."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment |= {"PYTHONPATH": str(site), "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_of_the_plugin() -> Iterator[tuple[str, str]]:
    """Path and content of each file: the page names it before its block."""
    yield "pyproject.toml", block(PAGE, "A plug-in", "toml").text
    text = (REPOSITORY / PAGE).read_text("utf-8")
    names = re.findall(r"^`(attempt_log/\w+\.py)`", text, re.MULTILINE)
    yield from zip(names, (each.text for each in below(PAGE, "A plug-in", "python")), strict=True)


@pytest.mark.slow
def test_the_plug_in_writes_a_line_for_a_claimed_attempt(tmp_path: Path) -> None:
    for name, text in files_of_the_plugin():
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    site, log = tmp_path / "site", tmp_path / "attempts.txt"
    install(tmp_path / "project", site)
    (tmp_path / "decathlon.toml").write_text(f'attempt_log = "{log}"\n')
    command = ["-m", "decathlon_mcp.cli"]
    run([*command, "play", "tune-reactor", "--script", ORACLE], site, tmp_path)
    assert re.fullmatch(r"[0-9a-f]{16} tune-reactor\n", run([*command, "attempts", log], site, tmp_path))


@pytest.mark.slow
def test_the_provider_from_scratch_plays_a_task(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(REPOSITORY / "examples" / "box", site)
    command = ["-m", "decathlon_mcp.cli", "play", "tune-reactor", "--provider", "box", "--script", ORACLE]
    assert '"isolation": "none"' in run(command, site, tmp_path)


def test_the_profile_belongs_to_checkouts_with_its_marks(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "my_suites" / "profiles").mkdir(parents=True)
    (site / "my_suites" / "profiles" / "lab.yaml").write_text(block(PAGE, "A profile of suites", "yaml").text)
    (plugin,) = re.findall(r"`(Plugin\(.*?\))`", (REPOSITORY / PAGE).read_text("utf-8"))
    (site / "my_suites" / "__init__.py").write_text(
        f"from decathlon_mcp.hooks import Plugin\nPLUGIN = {plugin}\n"
    )
    info = site / "my_suites-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-suites\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[decathlon_mcp.plugins]\nmy-suites = my_suites:PLUGIN\n")
    copy_template(tmp_path / "suite")
    (tmp_path / "suite" / "suite.yaml").unlink(missing_ok=True)
    (tmp_path / "suite" / "lab.toml").touch()
    program = (
        "from decathlon_mcp.suites.loading import load_suite; s = load_suite('suite');"
        " print(s.profile.name, s.profile.image, *s.tasks)"
    )
    assert run(["-c", program], site, tmp_path) == "lab my-lab:latest restock-shop\n"


def test_the_entry_of_a_client_is_one() -> None:
    entry = block(PAGE, "A client", "python").text
    client = eval(entry, {"Client": Client})  # the page's own text
    assert (client.heading, client.language) == ("my-client", "python")


@pytest.mark.slow
def test_a_sandbox_opened_by_hand_shows_the_messages_of_its_driver(tmp_path: Path) -> None:
    program = block("docs/debugging.md", "A sandbox by hand", "python").text
    output = run(["-c", program], tmp_path, tmp_path)
    sent, received = (re.findall(rf"^{mark} (.*)", output, re.MULTILINE) for mark in "><")
    assert any('"method":"run"' in line for line in sent)
    assert any('"exit_code":0' in line for line in received)
    assert re.search(r"^0 uid=\d+", output, re.MULTILINE)
