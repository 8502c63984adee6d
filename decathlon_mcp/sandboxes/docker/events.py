"""Follows the engine's events, to know how containers exit."""

# Containers are removed as they exit (`AutoRemove`), so they cannot be inspected afterwards: only the events
# have the exit code. One request follows all containers of a server.

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
_SIGKILL_EXIT_CODE = 137


class ContainerExit:
    """How one container exited, as far as the engine has reported it."""

    def __init__(self) -> None:
        self.out_of_memory = False
        """Whether the kernel killed a process inside for lack of memory; the first process may live on."""
        self.exit_code: int | None = None
        self.ended = anyio.Event()

    @property
    def cause(self) -> str | None:
        if self.exit_code is None:
            return None
        if self.out_of_memory and self.exit_code == _SIGKILL_EXIT_CODE:
            return "out of memory"
        return f"exit code {self.exit_code}"


class EventWatch:
    """Follows the containers of one owner, by the names of their sandboxes."""

    def __init__(self, engine: Engine, owner: str) -> None:
        self._engine = engine
        self._owner = owner
        self._exits: dict[str, ContainerExit] = {}
        self._thread = CapacityLimiter(1)
        self._events: EventStream | None = None
        self._stopped = False
        self.listening = anyio.Event()
        """Set while connected: exits from now on are reported."""

    @contextmanager
    def following(self, name: str) -> Generator[ContainerExit]:
        container_exit = self._exits[name] = ContainerExit()
        try:
            yield container_exit
        finally:
            del self._exits[name]

    async def run(self) -> None:
        """Follow events until cancelled; connects again after the engine has restarted."""
        await self._engine.connected.wait()
        api = await self._engine.api()
        try:
            while True:
                await to_thread.run_sync(self._follow, api, limiter=self._thread, abandon_on_cancel=True)
                if self.listening.is_set():
                    self.listening = anyio.Event()
                await anyio.sleep(RETRY_SECONDS)
        finally:
            self._stopped = True
            self._close_events()

    def _follow(self, api: Api) -> None:
        filters = {"label": f"{OWNER_LABEL}={self._owner}", "event": ["oom", "die"]}
        # The HTTP library raises ValueError or AttributeError when another thread closes the stream.
        with suppress(RequestException, DockerException, OSError, ValueError, AttributeError):
            self._events = api.events(filters=filters, decode=True)
            if self._stopped:
                self._close_events()
                return
            from_thread.run_sync(self.listening.set)
            for event in self._events:
                from_thread.run_sync(self._handle, event)

    def _close_events(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            with suppress(OSError, DockerException, AttributeError):
                events.close()

    def _handle(self, event: JsonObject) -> None:
        actor = as_object(event.get("Actor")) or {}
        attributes: dict[str, Any] = as_object(actor.get("Attributes")) or {}
        container_exit = self._exits.get(str(attributes.get(SANDBOX_LABEL)))
        if container_exit is None:
            return
        if event.get("Action") == "oom":
            container_exit.out_of_memory = True
        elif event.get("Action") == "die":
            with suppress(ValueError):
                container_exit.exit_code = int(attributes.get("exitCode", ""))
            container_exit.ended.set()
