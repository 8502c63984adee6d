"""Sphinx configuration of the site: the pages of this folder and three from elsewhere in the repository.

    make docs

The order of the pages is `NAVIGATION`. Every Sphinx warning ends the build: a page that is missing from it, a
dead link, a docstring that is not valid reStructuredText.

Decided 2026-11-21: Sphinx with MyST-Parser and Furo. MkDocs 1 is no longer maintained, and Material for
MkDocs is declared inactive; Zensical, its successor, is an alpha, ignores pages missing from its navigation,
and its search loads a script from the network when a site is opened from disk.

Decided 2026-11-22: sphinx.ext.autodoc makes the reference of the client, of its errors and of the verdict,
whose fields it lists without an extension for pydantic: the last release of sphinx-pydantic is from 2020, and
that of autodoc-pydantic is older than Sphinx 8. `docs/tables.py` writes the settings and the tables of
`docs/protocol.md` into their pages, so that they can also be read where the code is hosted.
"""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

FIRST_PAGE = "docs/index"
PAGES_ELSEWHERE = (
    "CHANGELOG.md",
    "benchmarks/ATTACKS.md",
    "benchmarks/SURVIVAL.md",
    "decathlon_mcp/starter/suite/README.md",
)
NAVIGATION: dict[str, tuple[str, ...]] = {
    "Start": ("index", "quickstart", "concepts", "playing", "alternatives"),
    "Connect and train": (
        "clients",
        "desktop-programs",
        "agent-programs",
        "training",
        "trainers",
        "verifiers",
        "evaluating",
        "sampling",
        "rewards",
    ),
    "Tasks": (
        "toolathlon",
        "recorded-web",
        "gym",
        "/decathlon_mcp/starter/suite/README",
        "writing-tasks",
        "audit",
    ),
    "Run a server": (
        "operating",
        "runs",
        "branching",
        "reliability",
        "prime",
        "troubleshooting",
        "debugging",
        "extending",
    ),
    "Trust": ("reward-integrity",),
    "Reference": ("reference/settings", "reference/*", "protocol", "architecture", "/CHANGELOG"),
    "Results": (
        "results/overview",
        "results/*",
        "/benchmarks/ATTACKS",
        "/benchmarks/SURVIVAL",
    ),
}
"""Groups of the sidebar and their pages, relative to this folder or, with a leading slash, to the repository.

A `*` matches the pages of a folder that are not listed."""

REMOTE_RESOURCE = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"'](https?://[^\"']+)"
)
"""Elements that a browser loads from another host without a click."""

REPOSITORY = Path(__file__).parents[1]
SOURCE_FOLDERS = {"docs", *(page.partition("/")[0] for page in PAGES_ELSEWHERE)}

project = "decathlon-mcp"
author = "the authors of decathlon-mcp"
language = "en-GB"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = FIRST_PAGE
include_patterns = ["docs/*.md", "docs/**/*.md", *PAGES_ELSEWHERE]
exclude_patterns = [entry.name for entry in REPOSITORY.iterdir() if entry.name not in SOURCE_FOLDERS]
myst_heading_anchors = 4
myst_disable_syntax = ["myst_block_break", "myst_line_comment", "myst_role", "myst_target"]
myst_links_external_new_tab = False

add_module_names = False
autodoc_class_signature = "separated"
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    # The client creates its own objects; the other three are for the modules of this package.
    "exclude-members": "__init__, __new__, read, mistake, keep_open",
}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
default_role = "literal"  # docstrings mark code with single backquotes, as Markdown does
python_maximum_signature_line_length = 88

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


def _add_toctrees(_app: Sphinx, page: str, source: list[str]) -> None:
    # Here and not in the page, which is also read where the code is hosted and no directives are known.
    if page != FIRST_PAGE:
        return
    for caption, pages in NAVIGATION.items():
        entries = ("Overview <self>" if entry == "index" else entry for entry in pages)
        lines = ["```{toctree}", ":hidden:", ":glob:", f":caption: {caption}", "", *entries, "```"]
        source[0] += "\n\n" + "\n".join(lines) + "\n"


def _signature_for_callers(
    _app: Sphinx,
    _kind: str,
    _name: str,
    subject: Any,
    _options: Any,
    arguments: str | None,
    result: str | None,
) -> tuple[str | None, str | None]:
    """Replaces the result of an asynchronous generator that is used as a context manager."""
    # contextlib.asynccontextmanager keeps the annotation of the function that it wraps.
    function = inspect.unwrap(subject) if callable(subject) else subject
    if result and function is not subject and inspect.isasyncgenfunction(function):
        result = result.replace("AsyncGenerator", "AbstractAsyncContextManager", 1)
    return arguments, result


def _check_no_remote_resources(app: Sphinx, error: Exception | None) -> None:
    """Raises ValueError if a browser would load something from another host: the site works offline."""
    for page in Path(app.outdir).rglob("*.html") if error is None else ():
        if urls := REMOTE_RESOURCE.findall(page.read_text("utf-8")):
            raise ValueError(f"{page} loads {urls[0]}")


def _write_index(app: Sphinx, error: Exception | None) -> None:
    """index.html redirects to the first page."""
    if error is None:
        target = f"0; url={FIRST_PAGE}.html"
        redirect = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="{target}">'
        Path(app.outdir, "index.html").write_text(redirect, "utf-8")


def _write_texts_for_models(app: Sphinx, error: Exception | None) -> None:
    """llms.txt and llms-full.txt of the site."""
    if error is not None:
        return
    llms = runpy.run_path(str(REPOSITORY / "docs" / "llms.py"))
    Path(app.outdir, "llms.txt").write_text(llms["llms_txt"](".html"), "utf-8")
    Path(app.outdir, "llms-full.txt").write_text(llms["llms_full_txt"](), "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _add_toctrees)
    app.connect("autodoc-process-signature", _signature_for_callers)
    app.connect("build-finished", _check_no_remote_resources)
    app.connect("build-finished", _write_index)
    app.connect("build-finished", _write_texts_for_models)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
