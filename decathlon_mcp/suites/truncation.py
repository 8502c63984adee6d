"""Where overlong tool results are saved, and how a result says so.

The driver truncates (`decathlon_sandbox.truncation`), so that the server never receives the whole text.
"""

from __future__ import annotations

FOLDER = ".overlong_tool_outputs"
"""Folder in the workspace where `handle_overlong_tool_outputs` looks for the full texts."""
OVERLONG_KEY = "decathlon/overlong"
"""Key in the `_meta` of a truncated result: the text's length in characters, and its path if it was saved."""
