"""Characters that a terminal or a browser would obey instead of showing: they are replaced by marks.

Everything on the page may come from a sandbox. Escape sequences, and characters that turn the direction of
text or have no width, could make it read differently from what it is.
"""

from __future__ import annotations

import re

# Controls of C0 and C1 without tab and line feed; soft hyphen, characters of direction or without width,
# separators of lines, tags, and halves of surrogate pairs, which UTF-8 does not have.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)


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
