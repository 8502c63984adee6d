"""Markdown of prompts and notes as HTML: it loads nothing, runs nothing, and leads only to where one clicks.

markdown-it escapes all text; its raw HTML is off. Links are those of http and https, and images are links.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, Final

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererProtocol
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from markupsafe import Markup, escape

from decathlon_mcp.plugins.page.marks import marked

MAX_PROSE_CHARACTERS: Final = 16 << 10
"""A longer text is shown as it is: Markdown that is made to take long takes half a second up to here."""
MAX_CELLS: Final = 20_000
"""Rows times columns of the tables that a text may have. A row of one sign gets cells for all columns: 16 KiB
became 700 KB of HTML in two seconds."""
MAX_NESTING = 20
HEADING = "h4"
"""Every heading: those of the page are above it."""


def prose(text: str) -> Markup:
    """A text that a person or a model has written, as Markdown if that does not take too long."""
    if len(text) > MAX_PROSE_CHARACTERS or _cells(text) > MAX_CELLS:
        return Markup('<pre class="words" tabindex="0">%s</pre>') % marked(text)
    # Once more behind: a reference such as `&#8238;` becomes its character.
    return Markup(f'<div class="prose" tabindex="0">{marked(_MARKDOWN.render(marked(text)))}</div>')


def _cells(text: str) -> int:
    """The most cells that tables in a text can have."""
    lines = text.splitlines()
    return len(lines) * max((line.count("|") for line in lines), default=0)


class _Markdown(MarkdownIt):
    def validateLink(self, url: str) -> bool:  # noqa: N802  (the library's)
        """Whether a link may have this address; else its text stays as it was written."""
        return url.lower().startswith(("http://", "https://"))


def _link(
    renderer: RendererProtocol, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any
) -> str:
    return _link_to(tokens[index].attrs.get("href"))


def _image(
    renderer: RendererProtocol, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any
) -> str:
    image = tokens[index]
    text = escape(image.content or "image")
    depth = sum(token.nesting for token in tokens[:index] if token.type in ("link_open", "link_close"))
    # A link cannot be in another one.
    return str(text) if depth else f"{_link_to(image.attrs.get('src'))}{text}</a>"


def _link_to(address: object) -> str:
    # An empty address would be this page's.
    return f'<a href="{escape(str(address))}" rel="noopener noreferrer">' if address else "<a>"


def _without_attributes(state: Any) -> None:
    """Leave out what only styles: the alignment of columns, the language of code; and level the headings."""
    for token in state.tokens:
        if token.tag in ("th", "td"):
            token.attrs = {}
        elif token.type == "fence":
            token.info = ""
        elif token.type in ("heading_open", "heading_close"):
            token.tag = HEADING


def _create() -> MarkdownIt:
    options: MutableMapping[str, Any] = {"html": False, "breaks": True, "maxNesting": MAX_NESTING}
    markdown = _Markdown("commonmark", options).enable(["table", "strikethrough"])  # pyright: ignore[reportArgumentType]
    markdown.add_render_rule("link_open", _link)
    markdown.add_render_rule("image", _image)
    markdown.core.ruler.push("without_attributes", _without_attributes)
    return markdown


_MARKDOWN = _create()
