"""What comes from a sandbox or a client is text: whatever it is, the document stays the same."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from decathlon_mcp.plugins.page.rendering import marked
from tests.history.stored_episodes import NOW, Call, Folder, Note
from tests.page.sites import signed_in
from tests.page.watching import ChangingServer, live_episode

pytestmark = pytest.mark.anyio

PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)
HTML_IMAGE = b"<!doctype html><script>alert(1)</script>"
HOSTILE = {
    "script": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "attribute": '" onmouseover="alert(1)" x=\'',
    "closing": "</pre></code></td></table></main></body></html><h1>owned</h1>",
    "template": "{{ 7 * 7 }}{% include 'base.html' %}${7*7}",
    "terminal": "\x1b[31mred\x1b[0m\x1b]8;;http://evil.example\x07link\x1b\\\x00\x08",
    "bidirectional": "safe\u202etxt.exe\u2066\u200f\u061c\ufeff\u200b",
    "surrogates": "\ud800 and \udfff",
    "link": "javascript:alert(1) http://evil.example/?q=1 [x](javascript:alert(1))",
    "brackets": "[" * 1_000_000,
    "lines": "\u2028\u2029\r\n\r" * 50,
    "emoji": "\U000e0041\U000e007f" + "e\u0301" * 200,
}


class Shape(HTMLParser):
    """The elements of a document, each with the names of its attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = sorted(name for name, _ in attrs)
        assert not [name for name in names if name.startswith("on") or name == "style"]
        for name, value in attrs:
            if name in ("href", "src", "action"):
                assert re.match(r"/(?!/)|#|data:image/(png|jpeg|gif|webp);base64,", value or ""), value
        self.elements.append(f"{tag} {names}")


def fill(state: Path, text: str, image: bytes = PNG) -> list[str]:
    """An episode that has this text wherever one can put it; the paths of its pages."""
    # As a server accepts them.
    label = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "", text)[:200]
    result: dict[str, Any] = {
        "content": [
            {"type": "text", "text": text},
            {"type": "image", "mimeType": "image/png", "data": base64.b64encode(image).decode()},
            {"type": "resource", "resource": {"uri": text[:300], "text": text}},
        ]
    }
    verdict = {
        "metrics": {label: 0.5},
        "weights": {label: 1},
        "evaluator_output": text[-8192:],
        "uncaught": text[:500],
        "detail": text[:4000],
        "preprocess_failure": text[:4000],
        "refused": [label],
    }
    # In both documents as long, so that both are folded or neither.
    entries = [
        Note(text),
        Note(text, "reasoning"),
        Call(label, {label: text}, text),
        Call(label, {"x": text}, text, failed=True),
        Call(label, [text], result),
    ]
    with Folder(state) as folder:
        names = [
            folder.add(
                handle,
                task=label,
                suite=label,
                labels={"run": label, "model": label, "attempt": label, "x": label},
                reward=0.5,
                entries=entries,
                verdict=verdict,
                prompt=text,
                started_at=NOW,
            )
            for handle in ("1" * 48, "2" * 48)
        ]
        folder.add("3" * 48, task=label, suite=label, labels={"run": label}, reward=None, ending=label)
        folder.add("4" * 48, task=label, suite=label, labels={"run": f"{label[:150]}2"}, started_at=NOW + 1)
    run, other = (quote(name, safe="", errors="replace") for name in (label, f"{label[:150]}2"))
    return [
        "/",
        "/runs",
        f"/runs/{run}",
        f"/runs?name={run}&q=type",
        f"/episodes?run={run}&sort=-calls",
        f"/e/{names[0]}?q={run}",
        f"/e/{names[0]}/calls?first=1&last=3",
        f"/compare?run={run}&run={other}",
        f"/compare/episodes?a={names[0]}&b={names[1]}",
    ]


def server_with(text: str) -> ChangingServer:
    values = dict.fromkeys(("task", "run", "model", "waiting_for"), text[:200])
    return ChangingServer(live_episode(1, **values))


def benign(text: str) -> str:
    """A text of letters that is as long, with line feeds where the other has them."""
    return "".join(each if each == "\n" else "a" for each in marked(text))


async def pages(state: Path, paths: list[str], server: ChangingServer) -> list[str]:
    async with signed_in(state, live=server.feed) as client:
        return [await page(client, path) for path in paths]


async def page(client: httpx2.AsyncClient, path: str) -> str:
    response = await client.get(path)
    assert response.status_code in (200, 404), (path, response.text)
    return response.text


@pytest.mark.parametrize("name", HOSTILE)
async def test_the_document_stays_the_same(tmp_path: Path, name: str) -> None:
    text = HOSTILE[name]
    shapes: list[list[list[str]]] = []
    for each, folder in ((text, tmp_path / "hostile"), (benign(text), tmp_path / "benign")):
        folder.mkdir()
        shown = await pages(folder, fill(folder, each), server_with(each))
        assert not re.search(
            "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069\u200b\ufeff\ud800-\udfff]",
            "".join(shown),
        )
        assert len("".join(shown)) < 4_000_000
        shapes.append([Shape(html).elements for html in shown])
    for hostile, harmless in zip(*shapes, strict=True):
        assert [x for x in zip_longest(hostile, harmless) if x[0] != x[1]][:3] == []


IMAGES = [
    ("image/png", PNG, True),
    ("image/gif", b"GIF89a" + bytes(9), True),
    ("image/jpeg", b"\xff\xd8\xff" + bytes(9), True),
    ("image/webp", b"RIFF\0\0\0\0WEBPVP8 ", True),
    ("image/webp", b"RIFF\0\0\0\0WAVEfmt ", False),
    ("image/png", HTML_IMAGE, False),
    ("image/svg+xml", b"<svg onload=alert(1)>", False),
    ("text/html", PNG, False),
    ("image/png;x", PNG, False),
]


async def test_only_images_are_shown_as_images(tmp_path: Path) -> None:
    names: list[str] = []
    with Folder(tmp_path) as folder:
        for number, (media_type, data, _) in enumerate(IMAGES):
            content = {"type": "image", "mimeType": media_type, "data": base64.b64encode(data).decode()}
            names.append(folder.add(f"{number}" * 48, entries=[Call(reply={"content": [content]})]))
    shown = await pages(tmp_path, [f"/e/{name}" for name in names], ChangingServer())
    for html, (media_type, data, is_image) in zip(shown, IMAGES, strict=True):
        assert (f'<img src="data:{media_type};base64,' in html) is is_image, (media_type, data)
        Shape(html)


async def test_a_huge_reply_is_sent_as_text_and_not_parsed(tmp_path: Path) -> None:
    huge = {"content": [{"type": "text", "text": "<b>x</b>" * 1_000_000}]}
    nested: Any = []
    for _ in range(500):
        nested = [nested]
    with Folder(tmp_path) as folder:
        name = folder.add("1" * 48, entries=[Call(reply=huge), Call(reply={"content": nested})])
    (html,) = await pages(tmp_path, [f"/e/{name}"], ChangingServer())
    assert "7.6 MiB more" in html
    assert "<b>" not in html
    assert len(html) < 40_000
