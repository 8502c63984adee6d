"""The site: the pages of this folder, and three from elsewhere in the repository, made by Sphinx.

    make docs

The pages are plain Markdown that reads as well where the code is hosted: what they link to is found from the
repository's root, and no directive stands in them. The order of the pages is here, in `NAVIGATION`. A page
that is missing from it, a link that leads nowhere, anything else that Sphinx warns of: each ends the build.

Decided 2026-11-21: Sphinx with MyST-Parser and Furo. MkDocs 1 is not kept any more, and Material for it is
declared inactive; Zensical, which follows it, is an alpha, passes over pages that its navigation lacks, and
has its search fetch a script from elsewhere where a site is read from disk.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

FIRST = "docs/quickstart"
ELSEWHERE = ("CHANGELOG.md", "benchmarks/RESULTS.md", "decathlon_mcp/starter/suite/README.md")
"""Pages that stand where they belong, and not in this folder."""
NAVIGATION: dict[str, tuple[str, ...]] = {
    "Start": ("quickstart", "concepts"),
    "Play": (
        "playing",
        "clients",
        "clients/claude-desktop",
        "clients/claude-code",
        "clients/cursor",
        "clients/vscode",
        "clients/shell",
        "clients/decathlon-client",
        "clients/python-sdk",
        "clients/python-sdk-1",
        "clients/*",
    ),
    "Train": ("training", "sampling", "rewards", "reward-integrity", "trainers/verifiers", "trainers/*"),
    "Suites": ("toolathlon", "gym", "/decathlon_mcp/starter/suite/README", "writing-tasks"),
    "Serve": ("operating", "troubleshooting", "protocol"),
    "Reference": (
        "reference/settings",
        "reference/client",
        "reference/errors",
        "reference/verdict",
        "/benchmarks/RESULTS",
        "/CHANGELOG",
    ),
}
"""Pages by their names in this folder or, after a slash, in the repository; a star: all the others there."""

FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"'](https?://[^\"']+)")
"""What a browser would get from elsewhere by itself."""

ROOT = Path(__file__).parents[1]
READ = {"docs", *(page.partition("/")[0] for page in ELSEWHERE)}

project = "decathlon-mcp"
author = "the authors of decathlon-mcp"
language = "en-GB"
extensions = ["myst_parser"]
root_doc = FIRST
include_patterns = ["docs/*.md", "docs/**/*.md", *ELSEWHERE]
exclude_patterns = [entry.name for entry in ROOT.iterdir() if entry.name not in READ]
myst_heading_anchors = 4
myst_disable_syntax = ["myst_block_break", "myst_line_comment", "myst_role", "myst_target"]
myst_links_external_new_tab = False

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "decathlon-mcp"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_use_index = False
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6b52", "color-brand-content": "#0b6b52"},
    "dark_css_variables": {"color-brand-primary": "#5fd3ae", "color-brand-content": "#5fd3ae"},
}


def navigation() -> str:
    """The table of all pages, as Sphinx wants it in its first."""
    folder = FIRST.rpartition("/")[0]
    blocks: list[str] = []
    for caption, pages in NAVIGATION.items():
        names = ["self" if f"{folder}/{page}" == FIRST else page for page in pages]
        blocks.append(
            "\n".join(["```{toctree}", ":hidden:", ":glob:", f":caption: {caption}", "", *names, "```"])
        )
    return "\n\n".join(blocks)


def _with_navigation(_: Sphinx, page: str, source: list[str]) -> None:
    if page == FIRST:
        source[0] += f"\n\n{navigation()}\n"


def _read_without_a_network(app: Sphinx, error: Exception | None) -> None:
    """Raises ValueError where a page would have a browser fetch something from elsewhere."""
    for page in Path(app.outdir).rglob("*.html") if error is None else ():
        if found := FETCHED.findall(page.read_text("utf-8")):
            raise ValueError(f"{page} fetches {found[0]}")


def _lead_to_the_first(app: Sphinx, error: Exception | None) -> None:
    """The site's own address leads to its first page."""
    if error is None:
        goes = (
            f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={FIRST}.html">'
        )
        Path(app.outdir, "index.html").write_text(goes, "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _with_navigation)
    app.connect("build-finished", _read_without_a_network)
    app.connect("build-finished", _lead_to_the_first)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
