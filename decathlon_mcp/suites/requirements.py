"""What keeps a task from running here: of what kind it is, the words for it, and where to read on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from decathlon_mcp.types import JsonObject

RequirementKind = Literal[
    "credential", "service", "server", "package", "local tool", "network", "text", "broken"
]

PLURALS: Mapping[RequirementKind, str] = {
    "credential": "credentials not filled in",
    "service": "services not there",
    "server": "MCP servers not described",
    "package": "servers' programs not there",
    "local tool": "local tools without code",
    "network": "networks that are switched off",
    "text": "texts not there in this language",
    "broken": "broken files",
}
"""A kind, as a heading over those of it."""

OURS = "docs/"
"""How a page of this project begins; any other is an address, or lies in the checkout."""
PAGES: Mapping[RequirementKind, str] = {
    "credential": "docs/toolathlon.md#which-tasks-run",
    "service": "docs/toolathlon.md#which-tasks-run",
    "server": "docs/writing-tasks.md",
    "package": "docs/toolathlon.md#play-it",
    "local tool": "docs/writing-tasks.md#suiteyaml",
    "network": "docs/operating.md#settings",
    "text": "docs/toolathlon.md#in-chinese",
    "broken": "docs/writing-tasks.md",
}
"""Where to read on when neither the suite nor its profile says a page of its own."""


@dataclass(frozen=True, slots=True)
class MissingRequirement:
    """`name` is what is lacking, `said` a sentence on it and on what to do, `page` where to read on."""

    kind: RequirementKind
    name: str
    said: str
    page: str

    @property
    def sentence(self) -> str:
        """As whoever asks for the task is told; of a broken file, the error's own words."""
        return self.said if self.kind == "broken" else f"{self.said} (see {self.page})"

    def to_json(self) -> JsonObject:
        """As `tasks --check --json` has it."""
        return {"kind": self.kind, "name": self.name, "said": self.said, "page": self.page}


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a suite, by patterns for names such as `token.github_token` or `service.poste`."""

    checkout: Path
    said: Mapping[str, str]

    def lack(
        self, kind: RequirementKind, name: str, said: str, *, called: str | None = None
    ) -> MissingRequirement:
        """A lack with its page; `called`: what patterns know it by, where that is not its name."""
        return MissingRequirement(kind, name, said, self._page(kind, called or name))

    def _page(self, kind: RequirementKind, name: str) -> str:
        found = [page for pattern, page in self.said.items() if fnmatchcase(name, pattern)]
        page = self.said.get(name) or (found[-1] if found else PAGES[kind])
        here = self.checkout / page.partition("#")[0]
        return (
            page if page.startswith(OURS) or "://" in page or not here.exists() else f"{self.checkout}/{page}"
        )
