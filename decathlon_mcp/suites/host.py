"""Where, and in which language, a suite's tasks are to run, and what keeps them from it there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from decathlon_mcp.suites.programs import Absent
from decathlon_mcp.suites.prompts import suffix_of
from decathlon_mcp.suites.requirements import MissingRequirement, Pages
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import Language


@dataclass(frozen=True, slots=True)
class HostInfo:
    """`has_network`: may a sandbox have one, if its task needs one?"""

    language: Language = "en"
    has_network: bool = True
    _absent: dict[str, Absent] = field(default_factory=dict[str, Absent], repr=False)

    def learn(self, absent: Mapping[str, Absent]) -> None:
        """What somebody who has looked did not find there, by the server's name."""
        self._absent.clear()
        self._absent.update(absent)

    def lacks(self, task: Task, pages: Pages) -> Iterator[MissingRequirement]:
        """What keeps a task from running here, whatever the checkout has."""
        if self.language != "en" and not task.parts.has_text:
            text = f"docs/task{suffix_of(self.language)}.md"
            said = f"needs a text in the language that is set, {self.language}, which is not there: {text}"
            yield pages.lack("text", text, said)
        if task.needs.network and not self.has_network:
            said = "needs a network, which `--network none` gives to no sandbox"
            yield pages.lack("network", "network", said)
        for name in task.needs.servers:
            absent = self._absent.get(name)
            # What can be fetched is fetched when the server starts, if there is a network.
            if absent is not None and not (absent.fetched and task.needs.network and self.has_network):
                said = f"needs {absent.what} for the MCP server {name!r}, which is not there: {absent.cure}"
                yield pages.lack("package", name, said, called=f"package.{name}")
