"""Templates, the style sheet and scripts, and how texts, numbers and times are written.

Everything on the page may come from a sandbox. Every value that a template shows passes `marked` and is
escaped, wherever it came from: there is no way to show text that does not. Prompts and notes are shown as
Markdown, which loads nothing, runs nothing and leads nowhere: markdown-it escapes all text, and its raw HTML,
links and images are off, so that these stay as they were written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final, cast
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from decathlon_mcp.cli.output import this_command

# Controls of C0 and C1 without tab and line feed; soft hyphen, characters of direction or without width,
# separators of lines, tags, and halves of surrogate pairs, which UTF-8 does not have.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)
MAX_PROSE_CHARACTERS: Final = 16 << 10
"""A longer text is shown as it is: Markdown that is made to take long takes half a second up to here."""
MAX_CELLS: Final = 20_000
"""Rows times columns of the tables that a text may have. A row of one sign gets cells for all columns: 16 KiB
became 700 KB of HTML in two seconds."""
MAX_NESTING = 20
HEADING = "h4"
"""Every heading of a text: the page's headings are above it."""
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_STEPS = ((1, "s"), (60, "min"), (3600, "h"), (86_400, "d"))


def marked(text: str) -> str:
    """The text with a visible mark in the place of each such character. A line may end with CR LF."""
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    return _INVISIBLE.sub(_mark, text)


def _mark(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode has pictures of these
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def prose(text: str) -> Markup:
    """A text that a person or a model has written, as Markdown if that does not take too long."""
    if len(text) <= MAX_PROSE_CHARACTERS and _cells(text) <= MAX_CELLS:
        # Once more behind: a reference such as `&#8238;` becomes its character.
        return Markup(f'<div class="prose" tabindex="0">{marked(_MARKDOWN.render(marked(text)))}</div>')
    return Markup('<pre class="words" tabindex="0">%s</pre>') % marked(text)


def _cells(text: str) -> int:
    """The most cells that tables in a text can have."""
    lines = text.splitlines()
    return len(lines) * max((line.count("|") for line in lines), default=0)


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
    markdown = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])  # pyright: ignore[reportArgumentType]
    markdown.disable(["link", "image", "autolink", "reference"])
    markdown.core.ruler.push("without_attributes", _without_attributes)
    return markdown


_MARKDOWN = _create()


class Assets:
    """The style sheet and the scripts, at an address that changes with their contents."""

    def __init__(self) -> None:
        folder = files(__package__ or "") / "assets"
        self.contents = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        digest = sha256(b"".join(self.contents[name] for name in sorted(self.contents)))
        self.digest = digest.hexdigest()[:16]

    def path(self, name: str) -> str:
        """The path of one file."""
        if name not in self.contents:
            raise KeyError(name)
        return f"/page/assets/{self.digest}/{name}"


def create_environment(assets: Assets, href: Callable[[str], str]) -> Environment:
    """The templates. `href`: the address of a path of the page."""
    environment = Environment(
        loader=PackageLoader("decathlon_mcp.plugins.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def asset(name: str) -> str:
        return href(assets.path(name))

    names: dict[str, Any] = environment.globals
    names |= {
        "program": this_command(anywhere=True),
        "href": href,
        "asset": asset,
        "run_path": run_path,
        "episode_path": episode_path,
    }
    written: dict[str, Any] = environment.filters
    for function in (
        *(ago, exact, iso, duration, size, number, percent, signed, grouped, measure, exactly),
        prose,
    ):
        written[function.__name__] = function
    return environment


def _finalize(value: object) -> object:
    # Before it is escaped: autoescape applies to what this returns.
    if value is None:
        return ""
    return value if isinstance(value, Markup | int | float) else marked(str(value))


def exactly(text: str) -> Markup:
    """What somebody has typed, for an input: without marks, since it is sent again."""
    return escape(text)


def run_path(name: str) -> str:
    """The path of a run's page."""
    # Browsers remove a part of a path that is one or two dots, also when it is quoted.
    return f"/runs?name={name}" if name in (".", "..") else f"/runs/{quote(name, safe='')}"


def episode_path(public_id: str, call: int | None = None) -> str:
    """The path of an episode's page, at one of its calls."""
    return f"/e/{public_id}" if call is None else f"/e/{public_id}?call={call}#c{call}"


def query(values: Mapping[str, object]) -> str:
    """A query with all parameters that have a value; a parameter with a list is repeated."""
    return "&".join(
        f"{quote(name)}={quote(str(value), safe='')}"
        for name, several in values.items()
        for value in (cast("list[object]", several) if isinstance(several, list) else [several])
        if value not in (None, "")
    )


def ago(time: float, now: float) -> str:
    """A time as its distance from now, such as `3 min ago`."""
    seconds = max(0.0, now - time)
    return "just now" if seconds < 5 else f"{duration(seconds, parts=1)} ago"


def exact(time: float) -> str:
    """A time with its date, in UTC."""
    return _datetime(time).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(time: float) -> str:
    """A time as programs read it."""
    return _datetime(time).isoformat(timespec="seconds")


def _datetime(time: float) -> datetime:
    try:
        return datetime.fromtimestamp(time, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


def duration(seconds: float | None, parts: int = 2) -> str:
    """A duration in its one or two largest units; nothing if it is unknown."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if parts > 1 and seconds < 10 else f"{seconds:.0f} s"
    index = max(index for index, (length, _) in enumerate(_STEPS) if seconds >= length)
    length, unit = _STEPS[index]
    text = f"{int(seconds // length)} {unit}"
    smaller, smaller_unit = _STEPS[index - 1]
    rest = int(seconds % length // smaller)
    return f"{text} {rest} {smaller_unit}" if parts > 1 and rest else text


def size(size_bytes: float) -> str:
    """A size in its largest unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "bytes" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many digits after the point; a dash if there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 2) -> str:
    """A difference with its sign."""
    if value is None:
        return "–"
    # Rounded first: what is less than a digit has no sign.
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}".replace("-", "\N{MINUS SIGN}") if rounded else f"{0:.{digits}f}"


def percent(value: float | None) -> str:
    """A share in percent; a dash if there is none."""
    return "–" if value is None else f"{100 * value:.0f} %"


def grouped(value: Any) -> str:
    """A whole number with its digits in groups of three."""
    return f"{int(value):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def measure(value: float) -> str:
    """The value of a metric: whole numbers in groups of three digits, others with six digits."""
    return grouped(value) if math.isfinite(value) and value == int(value) else f"{value:g}"
