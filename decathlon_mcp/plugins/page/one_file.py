"""An episode's page as one file, for mail or an archive: it needs no server, and nothing in it runs.

The page's own templates make the HTML. Of that is left out what a server or a script would be needed for:
scripts, forms, buttons, and links that lead elsewhere. Expressions find it, since all text in the HTML is
escaped: only templates write `<` and `"`.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterator
from functools import partial
from html import escape, unescape

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
_LEFT_OUT = re.compile(
    r'<(script|form|button|nav)\b.*?</\1>|<link\b[^>]*>|<a class="raw"[^>]*>.*?</a>| data-[a-z-]+="[^"]*"',
    re.DOTALL,
)
_TIME = re.compile(r'(<time\b[^>]* title="([^"]*)"[^>]*>)[^<]*')
_LINK = re.compile(r' href="([^"]*)"')
_CLOSED_BOX = re.compile(r'<div class="box closed" id="b([0-9]+)">(.*?)</div>', re.DOTALL)


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
    link = partial(_link, path, _attachments(history, details, path))
    style = assets.contents["style.css"].decode()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    # Browsers look for the encoding in the first 1,024 bytes only.
    head = '<meta charset="utf-8">'
    head += f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
    # Before anything that it concerns.
    page = _LINK.sub(link, _without_server(page)).replace("<head>", f"<head>{head}", 1)
    box_template = templates.get_template("calls.html")
    fits = {True: WHOLE_BYTES, False: MAX_FILE_BYTES - RESERVED_BYTES - len(boxes) * BOX_LINE_BYTES}
    written = start = 0
    for closed in _CLOSED_BOX.finditer(page):
        yield (data := page[start : closed.start()].encode("utf-8", "replace"))
        written += len(data)
        box = boxes[(int(closed[1]) - 1) // BOX_CALLS]
        entries = history.calls(summary.public_id, box.first, box.last) if fits else []
        content, kind = f"Left out, since the file would be too long: {closed[2]}", "box closed"
        for whole in list(fits):
            filled = box_template.render(episode=summary, entries=shown(entries, whole=whole), wanted=0)
            # Written as it is rendered, but for links and what is left out.
            if written + len(filled.encode("utf-8", "replace")) <= fits[whole]:
                content, kind = _LINK.sub(link, _without_server(filled)), "box"
                break
            # All that follows is folded too, or left out: nothing is rendered in vain.
            del fits[whole]
        yield (data := f'<div class="{kind}" id="b{box.first}">{content}</div>'.encode("utf-8", "replace"))
        written += len(data)
        start = closed.end()
    yield page[start:].encode("utf-8", "replace")


def _without_server(markup: str) -> str:
    """The markup without what needs a server or a script; a time is shown exactly, not as its distance."""
    return _TIME.sub(r"\1\2", _LEFT_OUT.sub("", markup))


def _link(path: str, files: dict[str, tuple[str, str]], link: re.Match[str]) -> str:
    """The address of a link. `files`: what paths of the page become. A link elsewhere loses its address."""
    href = unescape(link[1])
    target, _, fragment = href.partition("#")
    if href in files:
        data, file_name = files[href]
        return f' href="{escape(data)}" download="{escape(file_name)}"'
    return f' href="#{escape(fragment)}"' if fragment and target.partition("?")[0] in ("", path) else ""


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
