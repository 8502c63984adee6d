"""How an episode's calls reach the tools: the task's servers, and those of the suite's own code.

The latter are a server too, started when one of them is first called, and anew should it have died. What the
agent gets of a reply is decided here: as it came, or cut where the suite cuts.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import anyio

from decathlon_mcp.episodes.toolbox import Route
from decathlon_mcp.errors import DriverError
from decathlon_mcp.link import Link, Note
from decathlon_mcp.model import JsonObject, as_object
from decathlon_mcp.suites import LOCAL
from decathlon_mcp.suites.overlong import cut


class Calls:
    """Relays calls of one episode. `workspace` None: no reply is cut."""

    def __init__(
        self,
        link: Link,
        *,
        local: JsonObject | None = None,
        deadline_seconds: float = 60.0,
        workspace: PurePosixPath | None = None,
    ) -> None:
        self._link = link
        self._local = local
        self._deadline_seconds = deadline_seconds
        self._workspace = workspace
        self._started = False
        self._starting = anyio.Lock()

    async def call(
        self,
        route: Route,
        params: JsonObject,
        *,
        on_progress: Note | None = None,
        on_message: Note | None = None,
    ) -> JsonObject:
        """The whole reply, `result` or `error`. Raises what the link's `call` and `start` do."""
        own = route.server == LOCAL and self._local is not None
        if own:
            await self._up()
        try:
            reply = await self._link.call(
                route.server,
                "tools/call",
                params,
                timeout_seconds=None,
                on_progress=on_progress,
                on_message=on_message,
            )
        except DriverError as error:
            if own and error.data.get("reason") == "server":
                self._started = False
            raise
        return reply if own else await self._as_shown(reply)

    async def _up(self) -> None:
        async with self._starting:
            if not self._started and self._local is not None:
                with anyio.CancelScope(shield=True):  # one that is half started could not be started again
                    await self._link.start([self._local], deadline_seconds=self._deadline_seconds)
                self._started = True

    async def _as_shown(self, reply: JsonObject) -> JsonObject:
        result = as_object(reply.get("result"))
        if self._workspace is None or result is None:
            return reply
        overlong = cut(result, self._workspace)
        if overlong is None:
            return reply
        await self._link.arrange(
            {"make": str(overlong.path.parent)}, {"write": str(overlong.path), "text": overlong.whole}
        )
        return {**reply, "result": overlong.shown}
