"""The web: what sandboxes can have in place of a network, for tasks that need the internet. A plug-in's."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Literal, Protocol

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.grading.verdict import WebUse
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.settings import Settings
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task


class EpisodeWeb(Protocol):
    """The web of one episode's sandboxes."""

    def connected(
        self,
        sandbox: Sandbox,
        driver: DriverClient,
        role: Literal["preprocess", "agent", "grader"],
        *,
        shares_loopback: bool,
        has_own_files: bool,
        reattached: bool = False,
    ) -> AbstractAsyncContextManager[None]:
        """Give a sandbox the web while the body runs.

        `has_own_files`: it has file systems of its own, in which programs can be configured. `reattached`: an
        earlier server process has done that. Raises SetUpError.
        """
        ...

    async def use(self) -> WebUse | None:
        """How the requests were answered, for the verdict; None if that is not known."""
        ...


class Web(Protocol):
    """The web of a server."""

    @property
    def reaches_sites(self) -> bool:
        """Whether requests may reach the sites, so that they can change what others see."""
        ...

    def missing(self, suite: Suite, task: Task) -> str:
        """Why a task that needs the internet cannot be played; empty if it can. Blocks."""
        ...

    def launch_time(self, suite: Suite, task: Task) -> datetime | None:
        """The only launch time at which a task can be played; None if every one is possible. Blocks."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Run what episodes use. Raises SettingsError."""
        ...

    def episode(
        self, suite: Suite, task: Task, episode: str, launch_time: datetime
    ) -> AbstractAsyncContextManager[EpisodeWeb]:
        """Open the web of one episode. Raises SetUpError."""
        ...


def create_web(settings: Settings) -> Web | None:
    """The web of a server with these settings; None if its sandboxes have a network. Raises SettingsError."""
    made = (load(plugin.web)(settings) for plugin in plugins() if plugin.web)
    return next((web for web in made if web is not None), None)
