"""Writes `llms.txt`: what a coding agent needs to use this project, and its pages (llmstxt.org).

    .venv/bin/python docs/llms.py

The site has it too, and `llms-full.txt` with all pages. `AGENTS.md` is for those who change the code.
"""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
COMMANDS = """\
```sh
decathlon-mcp demo                              # plays a bundled task on a server of its own
decathlon-mcp serve                             # serves the bundled tasks at http://127.0.0.1:8765
decathlon-mcp tasks --search reactor            # lists tasks and whether they can run here
decathlon-mcp doctor                            # checks this machine
decathlon-mcp runs                              # lists the runs that were played
decathlon-mcp --help                            # lists every command
```
"""


def pages() -> list[Path]:
    """README, and the pages of this folder."""
    return [README, *sorted((REPOSITORY / "docs").rglob("*.md"))]


def llms_txt(suffix: str = ".md") -> str:
    """The commands, and the pages with their first sentences. `suffix`: of the pages' addresses."""
    lines = ["# decathlon-mcp", "", f"> {_first_paragraph(README)}", ""]
    lines += ["## Commands", "", COMMANDS, "## Pages", ""]
    for page in pages()[1:]:
        address = page.relative_to(REPOSITORY).with_suffix(suffix)
        lines.append(f"- [{_title(page)}]({address}): {_first_paragraph(page)}")
    return "\n".join(lines) + "\n"


def llms_full_txt() -> str:
    """The text of all pages."""
    return "\n\n".join(page.read_text("utf-8").strip() for page in pages()) + "\n"


def _title(page: Path) -> str:
    lines = page.read_text("utf-8").splitlines()
    return next(line for line in lines if line.startswith("# ")).removeprefix("# ")


def _first_paragraph(page: Path) -> str:
    """The first paragraph below the title, in one line and without links."""
    paragraphs = page.read_text("utf-8").split("\n\n")
    starts = re.compile(r"\w|`(?!``)|\*|\[")
    first = next((text for text in paragraphs[1:] if starts.match(text)), "")
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))


if __name__ == "__main__":
    (REPOSITORY / "llms.txt").write_text(llms_txt(), "utf-8")
