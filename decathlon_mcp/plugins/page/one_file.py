"""An episode's page as one file, for mail or an archive: it needs no server, and nothing in it runs.

The page's own templates make the HTML, in which all text is escaped. It passes a filter that leaves out
what a server or a script would be needed for: scripts, forms, buttons, and links that lead elsewhere. So a
template can change without a thought of this file.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from html import escape
from html.parser import HTMLParser

from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import EpisodeDetails
from decathlon_mcp.plugins.page.call_entries import shown
from decathlon_mcp.plugins.page.episode_pages import (
    BOX_CALLS,
    Box,
    episode_values,
    verdict_file,
)
from decathlon_mcp.plugins.page.rendering import Assets, create_environment, episode_path

MAX_FILE_BYTES = 20_000_000
WHOLE_BYTES = 10_000_000
"""From this size on, long replies are folded."""
RESERVED_BYTES = 100_000
"""Room for the end of the page. A line about a box that is left out has BOX_LINE_BYTES at most."""
BOX_LINE_BYTES = 300
MAX_ATTACHED_BYTES = 1 << 20
"""Longest list of tools that is in the file."""
DROPPED_TAGS = frozenset(
    (
        *("script", "style", "link", "form", "button", "iframe", "object", "embed", "template"),
        *("noscript", "base", "nav"),
    )
)
"""Elements that are left out with what is in them; all others are kept."""
VOID_TAGS = frozenset(["meta", "link", "img", "br", "hr", "base", "input", "embed"])
_BOX = re.compile(r"b([0-9]{1,9})")


class _Filter(HTMLParser):
    """Passes markup on, as far as one file can have it.

    `links`: what paths of the page become; other links lose their address. `fill`: the content of the box
    that starts with this call; None leaves it as it is.
    """

    def __init__(
        self, path: str, links: dict[str, tuple[str, str]], fill: Callable[[int], str | None]
    ) -> None:
        super().__init__(convert_charrefs=True)
        self._path = path
        self._links = links
        self._fill = fill
        self._skipped: list[str] = []
        """Open elements, from the dropped element on."""
        self._is_replacing = False
        """Whether only the content of the first of these is left out."""
        self._opened: list[tuple[str, str]] = []
        """Open elements: their names in the template and in the file."""
        self.output: list[str] = []

    def take(self) -> str:
        """What was passed on since the last time."""
        text = "".join(self.output)
        self.output.clear()
        return text

    def handle_decl(self, decl: str) -> None:
        self.output.append(f"<!{decl}>")

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.output.append(escape(data, quote=False))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        classes = (values.get("class") or "").split()
        if self._skipped or tag in DROPPED_TAGS or (tag == "a" and "raw" in classes):
            if tag not in VOID_TAGS:
                self._skipped.append(tag)
            return
        if tag == "img" and not (values.get("src") or "").startswith("data:image/"):
            return
        name, more = self._link(values.get("href") or "") if tag == "a" else (tag, "")
        kept = "".join(
            f' {key}="{escape(value or "")}"'
            for key, value in attrs
            if key != "href" and not key.startswith("data-")
        )
        self.output.append(f"<{name}{kept}{more}>")
        if tag in VOID_TAGS:
            return
        self._opened.append((tag, name))
        if tag == "time" and values.get("title"):
            self._replace(tag, escape(values["title"] or ""))
        if "box" in classes and "closed" in classes and (box := _BOX.fullmatch(values.get("id") or "")):
            content = self._fill(int(box[1]))
            if content is None:
                self.output.append("Left out, since the file would be too long: ")
            else:
                self.output[-1] = f'<div class="box" id="{box[0]}">'
                self._replace(tag, content)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID_TAGS:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            if tag not in self._skipped:
                return
            while self._skipped.pop() != tag:
                pass
            if self._skipped or not self._is_replacing:
                return
            self._is_replacing = False
        if not any(opened == tag for opened, _ in self._opened):
            return
        while True:
            opened, name = self._opened.pop()
            self.output.append(f"</{name}>")
            if opened == tag:
                return

    def _replace(self, tag: str, content: str) -> None:
        """Write this instead of what is in the element that was just opened."""
        self.output.append(content)
        self._skipped.append(tag)
        self._is_replacing = True

    def _link(self, href: str) -> tuple[str, str]:
        """The element of a link, and its address."""
        path, _, fragment = href.partition("#")
        if href in self._links:
            target, file_name = self._links[href]
            return "a", f' href="{escape(target)}" download="{escape(file_name)}"'
        if fragment and path.partition("?")[0] in ("", self._path):
            return "a", f' href="#{escape(fragment)}"'
        return ("g" if any(opened == "svg" for opened, _ in self._opened) else "span"), ""


def render_one_file(history: EpisodeHistory, details: EpisodeDetails) -> Iterator[bytes]:
    """The page of an episode in parts, together at most MAX_FILE_BYTES."""
    summary, last = details.summary, details.calls
    path, assets = episode_path(summary.public_id), Assets()
    templates = create_environment(assets, str)
    boxes = [
        Box(first, min(first + BOX_CALLS - 1, last), is_open=False)
        for first in range(1, max(last, 1) + 1, BOX_CALLS)
    ]
    page = templates.get_template("episode.html").render(
        episode_values(history, details, path),
        viewer=None,
        now=time.time(),
        tree=None,
        others=[],
        has_workspace=False,
        boxes=boxes if summary.has_files else [],
        entries=history.calls(summary.public_id, 1, 1),
        along=None,
        wanted=0,
        search="",
        found_nothing=False,
        may_end=False,
        replay_command="",
        watched=False,
    )
    box_template = templates.get_template("calls.html")
    written = 0

    fits = {True: WHOLE_BYTES, False: MAX_FILE_BYTES - RESERVED_BYTES - len(boxes) * BOX_LINE_BYTES}

    def fill(first: int) -> str | None:
        box = boxes[(first - 1) // BOX_CALLS]
        entries = history.calls(summary.public_id, box.first, box.last) if fits else []
        for whole in list(fits):
            content = box_template.render(episode=summary, entries=shown(entries, whole=whole), wanted=0)
            # Written as it is rendered, but for links and what is left out.
            if written + len(content.encode("utf-8", "replace")) <= fits[whole]:
                return _filtered(content, path, links)
            # All that follows is folded too, or left out: nothing is rendered in vain.
            del fits[whole]
        return None

    links = _attachments(history, details, path)
    style = assets.contents["style.css"].decode()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    # Browsers look for the encoding in the first 1,024 bytes only.
    head = '<meta charset="utf-8">'
    head += f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
    filtering = _Filter(path, links, fill)
    has_head = False
    # Line by line, so that what is written is counted before each box.
    for piece in page.splitlines(keepends=True):
        filtering.feed(piece)
        text = filtering.take()
        if not has_head and "<head>" in text:
            # Before anything that it concerns.
            text, has_head = text.replace("<head>", f"<head>{head}", 1), True
        data = text.encode("utf-8", "replace")
        written += len(data)
        yield data
    filtering.close()
    yield filtering.take().encode("utf-8", "replace")


def _filtered(markup: str, path: str, links: dict[str, tuple[str, str]]) -> str:
    filtering = _Filter(path, links, lambda _: None)
    filtering.feed(markup)
    filtering.close()
    return filtering.take()


def _attachments(history: EpisodeHistory, details: EpisodeDetails, path: str) -> dict[str, tuple[str, str]]:
    """Files that the page links to, as data URLs with their names, by path."""
    public_id = details.summary.public_id
    files: dict[str, tuple[str, bytes | None]] = {
        "verdict.json": (f"verdict-{public_id}.json", verdict_file(details)),
        "tools": (f"tools-{public_id}.json", history.tools(public_id)),
    }
    return {
        f"{path}/{name}": (
            f"data:application/json;base64,{base64.b64encode(content).decode()}",
            file_name,
        )
        for name, (file_name, content) in files.items()
        if content is not None and len(content) <= MAX_ATTACHED_BYTES
    }
