"""Extensions of the suites and the sandboxes of a server, made by plug-ins.

A suite has the hooks of the first plug-in whose function in `Plugin.suites` makes some for it; a server has
one source of sandboxes that were opened ahead, and one web in place of a network.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol, TypeAlias

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.grading.attempt import Attempt, Facts
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.sandboxes.base import Provider, Sandbox, SandboxSpec
from decathlon_mcp.settings import Settings
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

SandboxRole: TypeAlias = Literal["agent", "preprocess", "grader", "service"]
Opened: TypeAlias = tuple[Sandbox, DriverClient]
OpenNew: TypeAlias = Callable[[SandboxSpec], AbstractAsyncContextManager[Opened]]
"""Opens a new sandbox and connects to its driver; both are gone on exit."""


class SandboxSource:
    """Has sandboxes ready, inside `running`; none on a server without a plug-in for it."""

    @property
    def idle(self) -> int:
        """Number of sandboxes that can be taken."""
        return 0

    @property
    def opening(self) -> int:
        """Number of sandboxes that are being opened ahead."""
        return 0

    def running(self) -> AbstractAsyncContextManager[object]:
        """Open sandboxes ahead in the body; on exit, remove all sandboxes of the source, also if taken."""
        return nullcontext()

    async def expect(self, provider: Provider, spec: SandboxSpec, open_new: OpenNew) -> None:
        """Episodes will need sandboxes of this specification."""

    async def take(
        self, provider: Provider, spec: SandboxSpec, open_new: OpenNew, *, image: str | None = None
    ) -> tuple[Opened, Callable[[], Awaitable[None]]] | None:
        """Take a sandbox of this specification, and what removes it; None if there is none.

        It has another name. The removal is waited for, even if the caller is cancelled. `open_new` opens more
        of this kind. `image`: the digest that the image of `spec` must have, if not its present digest.
        """
        return None

    def give_way(self) -> None:
        """Give places back, if there are more sandboxes than may be: an episode opens one of its own."""

    def close(self) -> None:
        """Open nothing ahead any more, and remove in the background what nobody has taken."""

    async def empty(self) -> None:
        """Close it and wait until what nobody has taken is gone."""


CallFilter: TypeAlias = Callable[[bytes, JsonObject], Awaitable[bytes]]
"""Makes the arguments that a tool gets, as JSON text, of the agent's arguments and the tool's input schema.
Raises nothing but cancellation."""
ToolDescriptions: TypeAlias = Mapping[str, tuple[JsonObject, ...]]
"""The tools (name, description, inputSchema) of each entry of `needed_local_tools` in `task_config.json`."""


class SuiteHooks:
    """What hangs on the episodes of one suite; each method has a default that does nothing."""

    def facts(self) -> JsonObject:
        """Members of the verdict that are the same for all episodes of the suite, see `Facts`."""
        return {}

    def call_filter(self, facts: Facts) -> CallFilter | None:
        """What changes the arguments of calls in an episode with these facts; None: nothing.

        The suite's local tools are called without it.
        """
        return None

    async def describe_local_tools(
        self, task: Task, driver: DriverClient, *, root: PurePosixPath, timeout_seconds: float
    ) -> ToolDescriptions:
        """The tools of the suite's own code that a task lists. Raises SetUpError."""
        return {}

    def local_server(self, descriptions: ToolDescriptions, root: PurePosixPath) -> JsonObject | None:
        """The SERVER object, for the driver's `start`, of the server that runs these local tools."""
        return None

    def evaluator_log(self, attempt: Attempt, task: Task, root: PurePosixPath) -> Iterable[bytes]:
        """The file of a closed attempt that its evaluator reads, in chunks that are the same every time.

        `root`: the suite's folder in the evaluator's sandbox. Empty: the evaluator gets no file, and so not
        the agent's answer. Iterating blocks.
        """
        return ()

    def files(self, attempt: Attempt, task: Task, verdict: Verdict) -> Mapping[str, Iterable[bytes]]:
        """Files for the folder of a graded episode, by name, in chunks. Iterating blocks."""
        return {}


def suite_hooks(suite: Suite) -> SuiteHooks:
    """The hooks of a suite. Raises SettingsError if its profile needs a plug-in that is not installed."""
    made = (load(part)(suite) for plugin in plugins() for part in plugin.suites)
    hooks = next((hooks for hooks in made if hooks is not None), None)
    profile = suite.profile
    if hooks is None and (profile.local_code or profile.coerces_arguments):
        raise SettingsError(
            f"suite {suite.name}: `local_code` and `coerces_arguments` need the plug-in toolathlon, "
            "which is not installed"
        )
    return hooks or SuiteHooks()


class EpisodeResource:
    """What a plug-in opens for one episode, and the sandboxes of the episode share."""

    drivers: Sequence[DriverClient] = ()
    """Drivers of sandboxes without which the episode cannot go on."""

    def attached(
        self, sandbox: Sandbox, driver: DriverClient, role: SandboxRole, reattached: bool
    ) -> AbstractAsyncContextManager[None]:
        """Give a sandbox of the episode what it gets of this resource, in the body.

        `reattached`: an earlier server process has done that. Raises SetUpError.
        """
        return nullcontext()

    async def facts(self) -> JsonObject:
        """Members of the episode's verdict."""
        return {}


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
        self, factory: Any, task: Task, episode: str, launch_time: datetime
    ) -> AbstractAsyncContextManager[EpisodeResource]:
        """Open the web of one episode, given the `SandboxFactory` of its suite. Raises SetUpError."""
        ...


def create_web(settings: Settings) -> Web | None:
    """The web of a server with these settings; None if its sandboxes have a network. Raises SettingsError."""
    made = (load(plugin.web)(settings) for plugin in plugins() if plugin.web)
    return next((web for web in made if web is not None), None)
