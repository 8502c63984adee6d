"""The commands that `AGENTS.md` and `llms.txt` give to coding agents."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from decathlon_mcp.cli.options import PREFIX
from docs.llms import llms_full_txt, llms_txt, pages
from tests.docs.pages import REPOSITORY, blocks

FILES = (REPOSITORY / "AGENTS.md", REPOSITORY / "llms.txt")
SECONDS = 300.0
"""Limit of one command; a demo takes half a minute on a busy machine."""


def lines() -> Iterator[str]:
    """The commands of both files: those of their shell blocks, and the Makefile's targets in their text."""
    for file in FILES:
        for block in blocks(file, "sh"):
            for line in block.text.splitlines():
                yield shlex.join(shlex.split(line, comments=True)).removeprefix(".venv/bin/")
        yield from re.findall(r"`(make [a-z-]+)`", file.read_text("utf-8"))


def test_the_files_name_commands() -> None:
    assert {"make test", "python docs/llms.py", "decathlon-mcp serve"} <= {*lines()}


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({*lines()}))
def test_every_command_works(line: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(line)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment["XDG_STATE_HOME"] = str(tmp_path)
    if program == "make":
        # What a target runs takes minutes: make says whether the target is there.
        run(["make", "-n", *arguments], environment)
    elif program == "decathlon-mcp":
        # `tests/cli` has the demo and the server run.
        shown = ["--help"] if arguments[0] in ("serve", "demo") else []
        run([sys.executable, "-m", "decathlon_mcp.cli", *arguments, *shown], environment)
    elif arguments[0] in ("docs/tables.py", "docs/llms.py"):
        # They write files that other tests read, and that tests compare with what they would write.
        assert (REPOSITORY / arguments[0]).is_file()
    else:
        assert program == "python"
        collecting = ["--collect-only", "-q"] if arguments[:2] == ["-m", "pytest"] else []
        run([sys.executable, *arguments, *collecting], environment)


def run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:]


def test_the_texts_for_models_are_current_and_name_every_page() -> None:
    assert (REPOSITORY / "llms.txt").read_text("utf-8") == llms_txt(), "write it with: python docs/llms.py"
    whole = llms_full_txt()
    for page in pages():
        text = page.read_text("utf-8").strip()
        assert text in whole
        assert page.name == "README.md" or f"]({page.relative_to(REPOSITORY)}): " in llms_txt()
