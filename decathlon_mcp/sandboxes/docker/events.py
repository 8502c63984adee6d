"""What an engine tells of the ends of our containers: one watch for all of them.

With `auto_remove` a container that has ended cannot be asked why: only the engine's events say it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
from anyio import CapacityLimiter, from_thread, to_thread
from docker.errors import DockerException
from requests.exceptions import RequestException

from decathlon_mcp.sandboxes.docker.engine import Api, Engine, EventStream
from decathlon_mcp.types import JsonObject, as_object

OWNER_LABEL = "decathlon.owner"
SANDBOX_LABEL = "decathlon.sandbox"

RETRY_SECONDS = 1.0
_KILLED = 137


class ContainerExit:
    """What is known of one container's end."""

    def __init__(self) -> None:
        self.out_of_memory = False
        self.exit_code: int | None = None
        self.ended = anyio.Event()

    @property
    def cause(self) -> str | None:
        if self.exit_code is None:
            return None
        if self.out_of_memory and self.exit_code == _KILLED:
            return "out of memory"
        return f"exit code {self.exit_code}"


class EventWatch:
    """Follows the containers of one owner, by the names of their sandboxes."""

    def __init__(self, engine: Engine, owner: str) -> None:
        self._engine = engine
        self._owner = owner
        self._fates: dict[str, ContainerExit] = {}
        self._thread = CapacityLimiter(1)
        self._stream: EventStream | None = None
        self._stopped = False
        self.listening = anyio.Event()
        """Set while the engine is being listened to: what ends from now on is told."""

    @contextmanager
    def following(self, name: str) -> Generator[ContainerExit]:
        container_exit = self._fates[name] = ContainerExit()
        try:
            yield container_exit
        finally:
            del self._fates[name]

    async def run(self) -> None:
        """Listen until cancelled, to an engine that is restarted too."""
        await self._engine.connected.wait()
        api = await self._engine.api()
        try:
            while True:
                await to_thread.run_sync(self._listen, api, limiter=self._thread, abandon_on_cancel=True)
                if self.listening.is_set():
                    self.listening = anyio.Event()
                await anyio.sleep(RETRY_SECONDS)
        finally:
            self._stopped = True
            self._hang_up()

    def _listen(self, api: Api) -> None:
        filters = {"label": f"{OWNER_LABEL}={self._owner}", "event": ["oom", "die"]}
        # The last two are what the HTTP library says when a stream is closed under it.
        with suppress(RequestException, DockerException, OSError, ValueError, AttributeError):
            self._stream = api.events(filters=filters, decode=True)
            if self._stopped:
                self._hang_up()
                return
            from_thread.run_sync(self.listening.set)
            for event in self._stream:
                from_thread.run_sync(self._take, event)

    def _hang_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError, DockerException, AttributeError):
                stream.close()

    def _take(self, event: JsonObject) -> None:
        actor = as_object(event.get("Actor")) or {}
        about: dict[str, Any] = as_object(actor.get("Attributes")) or {}
        container_exit = self._fates.get(str(about.get(SANDBOX_LABEL)))
        if container_exit is None:
            return
        if event.get("Action") == "oom":
            container_exit.out_of_memory = True
        elif event.get("Action") == "die":
            with suppress(ValueError):
                container_exit.exit_code = int(about.get("exitCode", ""))
            container_exit.ended.set()
