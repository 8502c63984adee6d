"""Follows the engine's events, to know how containers exit."""

# Most containers are removed as they exit (`AutoRemove`), so they cannot be inspected afterwards: only the
# events have the exit code. One request follows all containers of all servers, because a server also has
# containers that it has reattached, which are labelled with another owner.

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any

import anyio
from anyio import CapacityLimiter, from_thread, to_thread
from docker.errors import DockerException, NotFound
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from decathlon_mcp.plugins.docker.engine import Api, Engine, EventStream
from decathlon_mcp.sandboxes.base import OUT_OF_MEMORY
from decathlon_mcp.types import JsonObject, as_object

OWNER_LABEL = "decathlon.owner"
SANDBOX_LABEL = "decathlon.sandbox"

EXIT_EVENTS: Mapping[str, Any] = {"label": SANDBOX_LABEL, "event": ["oom", "kill", "die"]}
"""Filters of Docker's events."""
_SIGKILL_EXIT_CODE = 137
_SIGKILL = ("9", "SIGKILL", "KILL")
LIVING_STATES = frozenset({"created", "running", "paused", "restarting"})
"""States of containers whose first process has not ended."""

_log = logging.getLogger(__name__)


class ContainerExit:
    """How one container exited, as far as the engine has reported it."""

    def __init__(self) -> None:
        self.out_of_memory = False
        """Whether the kernel killed a process inside for lack of memory; the first process may live on."""
        self.was_killed = False
        """Whether somebody had the engine kill it, which no process inside can."""
        self.exit_code: int | None = None
        self.started = False
        """Whether the container has been running. Set by its owner: from then on it can have ended."""
        self.ended = anyio.Event()

    @property
    def cause(self) -> str | None:
        cause = _cause(self.exit_code, self.out_of_memory and not self.was_killed)
        return f"killed by the engine, {cause}" if cause and self.was_killed else cause


def cause_in(state: JsonObject) -> str | None:
    """Why a container ended that the engine still has; `state` is its state there."""
    return _cause(int(state.get("ExitCode") or 0), bool(state.get("OOMKilled")))


def _cause(exit_code: int | None, out_of_memory: bool) -> str | None:
    if exit_code is None:
        return None
    if out_of_memory and exit_code == _SIGKILL_EXIT_CODE:
        return OUT_OF_MEMORY
    return f"exit code {exit_code}"


class EventWatch:
    """Follows containers, by the labels of their sandboxes.

    `filters`: of the engine's events, which may let others through.
    """

    def __init__(self, engine: Engine, filters: Mapping[str, Any] = EXIT_EVENTS) -> None:
        self._engine = engine
        self._filters = filters
        self._exits: dict[tuple[str, str], ContainerExit] = {}
        self._thread = CapacityLimiter(1)
        self._events: EventStream | None = None
        self._stopped = False
        self.listening = anyio.Event()
        """Set while connected: exits from now on are reported."""
        self.engine_is_gone = False
        """Whether the engine, which had answered, does not accept connections any more."""

    @contextmanager
    def following(self, owner: str, name: str) -> Generator[ContainerExit]:
        container_exit = self._exits[owner, name] = ContainerExit()
        try:
            yield container_exit
        finally:
            del self._exits[owner, name]

    async def run(self) -> None:
        """Follow events until cancelled; connects again after the engine has restarted."""
        self._stopped = False
        await self._engine.connected.wait()
        api = await self._engine.api()
        try:
            while True:
                await to_thread.run_sync(self._follow, api, limiter=self._thread, abandon_on_cancel=True)
                if self.listening.is_set():
                    self.listening = anyio.Event()
                self.engine_is_gone = not await to_thread.run_sync(self._accepts, limiter=self._thread)
                await anyio.sleep(1)  # the engine is gone; it restarts within seconds
        finally:
            self._stopped = True
            self._close_events()

    def _accepts(self) -> bool:
        try:
            self._engine.try_to_connect()
        except OSError:
            return False
        return True

    def _follow(self, api: Api) -> None:
        """Follow events until they end, for whatever reason."""
        try:
            self._engine.try_to_connect()
            self._events = api.events(filters=self._filters, decode=True)
            if self._stopped:
                self._close_events()
                return
            from_thread.run_sync(self._on_listening)
            self._look_for_missed_exits(api)
            for event in self._events:
                from_thread.run_sync(self._handle, event)
        except (RequestException, DockerException, HTTPError, HTTPException, OSError):
            pass  # the engine ended, perhaps in the middle of an event
        except (ValueError, AttributeError):
            pass  # another thread has closed the stream
        except Exception:  # noqa: BLE001
            _log.exception("the engine's events ended")

    def _look_for_missed_exits(self, api: Api) -> None:
        """Report the containers that ended while no events were followed, for example with their engine."""
        exits = tuple(self._exits.items())
        started = [labels for labels, each in exits if each.started and not each.ended.is_set()]
        if not started:
            return
        containers = api.containers(all=True, filters={"label": SANDBOX_LABEL})
        found = {_labels(container.get("Labels")): container for container in containers}
        for labels in started:
            container = found.get(labels)
            state: JsonObject | None = None
            if container is not None:
                if container.get("State") in LIVING_STATES:
                    continue
                with suppress(NotFound):
                    state = as_object(api.inspect_container(str(container["Id"])).get("State"))
            from_thread.run_sync(self._report_missed_exit, labels, state)

    def _report_missed_exit(self, labels: tuple[str, str], state: JsonObject | None) -> None:
        container_exit = self._exits.get(labels)
        if container_exit is not None and container_exit.started:
            if state is not None:
                container_exit.out_of_memory = bool(state.get("OOMKilled"))
                container_exit.exit_code = int(state.get("ExitCode") or 0)
            container_exit.ended.set()

    def _on_listening(self) -> None:
        self.engine_is_gone = False
        self.listening.set()

    def _close_events(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            with suppress(OSError, DockerException, AttributeError):
                events.close()

    def _handle(self, event: JsonObject) -> None:
        actor = as_object(event.get("Actor")) or {}
        attributes: dict[str, Any] = as_object(actor.get("Attributes")) or {}
        container_exit = self._exits.get(_labels(attributes))
        if container_exit is None:
            return
        if event.get("Action") == "oom":
            container_exit.out_of_memory = True
        elif event.get("Action") == "kill":
            container_exit.was_killed |= attributes.get("signal") in _SIGKILL
        elif event.get("Action") == "die":
            with suppress(ValueError):
                container_exit.exit_code = int(attributes.get("exitCode", ""))
            container_exit.ended.set()


def _labels(labels: object) -> tuple[str, str]:
    labels = as_object(labels) or {}
    return str(labels.get(OWNER_LABEL)), str(labels.get(SANDBOX_LABEL))
