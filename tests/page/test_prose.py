"""Markdown of prompts and notes: what is in it is shown, and nothing of it is loaded or obeyed."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decathlon_mcp.plugins.page.rendering import MAX_PROSE_CHARACTERS, prose

TAGS = {
    *("div", "p", "h4", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "s", "br", "hr"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}


class Elements(HTMLParser):
    """The elements of a rendered text. Any that could load, run or style something fails."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        values = dict(attrs)
        assert set(values) <= {"div": {"class", "tabindex"}, "pre": {"class", "tabindex"}}.get(
            tag, {"start"} if tag == "ol" else set()
        )
        self.tags.append(tag)


def test_markdown_is_shown_as_it_is_meant() -> None:
    text = (
        "# Task\n\n1. Read **all**\nof `a.md`\n2. ~~Write~~\n\n| a |\n|--:|\n| 1 |\n\n```py\nx = 1\n```\n> so"
    )
    elements = Elements(prose(text))
    assert " ".join(elements.tags) == (
        "div h4 ol li strong br code li s table thead tr th tbody tr td pre code blockquote p"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[x](https://a.example/?q=1&amp;r=2)",
        "&lt;http://a.example/&gt;",
        "[x][y]",
        "![a picture](http://a.example/track.png)",
        "[![a](http://a.example/b.png)](/page/leave)",
        "[x](javascript:alert(1))",
    ],
)
def test_a_link_or_an_image_stays_as_it_was_written(text: str) -> None:
    html = prose(f"{unescape(text)}\n\n[y]: HTTP://a.example/ 'title'")
    assert Elements(html).tags == ["div", "p", "p"]
    assert text in html


def test_html_and_control_characters_are_text() -> None:
    text = (
        "<script>alert(1)</script>\n<img src=x onerror=alert(1)>\n&#8238;gpj.exe &#x1b;[31m \x1b\u202e <?x?>"
    )
    html = prose(text)
    Elements(html)
    assert "&lt;script&gt;" in html
    assert not re.search("[\x1b\u202e]", html)
    assert "⟨U+202E⟩gpj.exe" in html


def test_a_long_text_is_not_parsed() -> None:
    html = prose("**" + "x" * MAX_PROSE_CHARACTERS)
    assert html.startswith('<pre class="words" tabindex="0">**x')


@pytest.mark.parametrize("piece", ["![", "[a](", "> ", "- ", "`a", "**a", "|a", "<a:"])
def test_a_text_that_is_made_to_take_long_does_not(piece: str) -> None:
    # Without a limit of nesting, or with a quadratic rule, this takes minutes.
    Elements(prose(piece * (MAX_PROSE_CHARACTERS // len(piece))))


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("[]()!<>*_`~|#-:&;/\\ \n\t\"'ahtps1.\u202e\ud800\0"), max_size=200))
def test_no_text_becomes_anything_else(text: str) -> None:
    html = prose(text)
    Elements(html)
    html.encode()


def test_short_rows_of_a_wide_table_do_not_become_many_cells() -> None:
    text = ("|a" * 1_500 + "|\n" + "|-" * 1_500 + "|\n" + "|\n" * 4_000)[:MAX_PROSE_CHARACTERS]
    assert len(prose(text)) < 2 * len(text)
    assert "<table>" in prose("|a" * 20 + "|\n" + "|-" * 20 + "|\n" + "|\n" * 100)
