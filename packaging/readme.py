"""Puts the README on the package's page, with addresses of the repository at the version's tag as links.

hatchling calls it when it builds the package (`tool.hatch.metadata.hooks.custom` in pyproject.toml).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?![a-z]+:|#)[^)]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Sets the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the fields of `project`."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        readme = package_readme(text, metadata["urls"]["Homepage"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def package_readme(text: str, homepage: str, version: str) -> str:
    """The text with absolute links. Images are raw files: a page of the repository is no picture."""

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['text']}]({homepage}/{kind}/v{version}/{match['path']})"

    return LINK.sub(absolute, text)
