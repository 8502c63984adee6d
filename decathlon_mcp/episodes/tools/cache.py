"""Tools that are known before a task's servers run: the cache of their lists, and the suite's local tools.

A list is kept under a key of everything that normally decides it: the suite's revision, the image, the task
and its servers' configurations with their templates unfilled. No credential is in the key. A list is written
only by a set-up that has started the servers, before any tool can be called, so that no agent can write one.
A server that starts later and has other tools has the list deleted; the next episode starts its servers at
set-up again.

The suite's local tools run in one more server, named `local`, which starts with the first call of one of
them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import PurePosixPath
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from decathlon_mcp import __version__
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.tools.offered import (
    OfferedTools,
    ToolRouter,
    shared_router,
)
from decathlon_mcp.errors import DriverError, SetUpError, SuiteError
from decathlon_mcp.sandboxes.base import Provider
from decathlon_mcp.storage.file_cache import FileCache
from decathlon_mcp.suites.local_tools import (
    ToolDescriptions,
    describe_command,
    known_needs,
    parse_descriptions,
)
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, Names, as_json

log = logging.getLogger("decathlon.episodes")
ROOT = b"\\u0000root\\u0000"
"""Stands in a file for the suite's root in the sandbox, which some providers choose for each sandbox. As JSON
text; no server has NUL in a description."""
MEMO_SECONDS = 2.0
"""How long an answer before the set-up may rely on the revision and the image that an earlier episode of the
task has found. The set-up looks again, at what it uses."""
OUTPUT_TAIL = 2000
"""Characters of a failed command's stderr that an error message quotes."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class KnownTools:
    """The tools of a task from the cache. `key`: where they are kept."""

    key: str
    tools: OfferedTools
    router: ToolRouter


@dataclass(frozen=True)
class ToolLists:
    """The cached tool lists of one suite."""

    cache: FileCache
    suite: Suite
    provider: Provider
    image: str | None
    names: Names
    _expected_keys: dict[str, tuple[float, str | None]] = field(default_factory=dict, repr=False)
    _known: WeakValueDictionary[tuple[bytes, str], KnownTools] = field(
        default_factory=WeakValueDictionary[tuple[bytes, str], KnownTools], repr=False
    )

    async def expected_key(self, task: Task) -> str | None:
        """The key of a task whose sandbox has not been opened; None if its image is not known yet."""
        at, key = self._expected_keys.get(task.id, (0.0, None))
        if key is None or anyio.current_time() - at > MEMO_SECONDS:
            revision = await anyio.to_thread.run_sync(self.suite.revision_of, task)
            key = await self.key(task, revision, None)
            self._expected_keys[task.id] = anyio.current_time(), key
        return key

    async def key(self, task: Task, revision: str, image_digest: str | None) -> str | None:
        """The key of a task's lists. `image_digest`: of its sandbox, if that is open."""
        environment = image_digest or await self.provider.environment(self.image)
        if environment is None:
            return None
        local_code = dict(self.suite.profile.local_code)
        decisive = {
            "version": __version__,
            "suite": self.suite.name,
            "revision": revision,
            "environment": environment,
            "task": task.id,
            "servers": [self._configuration(name) for name in task.needs.servers],
            "local_tools": {name: local_code.get(name) for name in task.needs.local_tools},
        }
        return sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()

    def _configuration(self, name: str) -> JsonObject | None:
        """A server's file with its templates unfilled; None if there is none, which fails the set-up."""
        server = self.suite.servers.get(name)
        return None if server is None else {**asdict(server), "file": server.file.name}

    async def find(self, key: str, root: PurePosixPath) -> KnownTools | None:
        """The tools under a key, for a sandbox with that root."""
        content = await anyio.to_thread.run_sync(self.cache.read, key)
        if content is None:
            return None
        identity = sha256(b"%b%b" % (key.encode(), content)).digest(), str(root)
        if (known := self._known.get(identity)) is not None:
            return known
        try:
            tools = OfferedTools.from_json(json.loads(content.replace(ROOT, _escaped(root))))
            router = shared_router(tools.servers, self.names)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("a cached tool list cannot be read", extra=fields(suite=self.suite.name))
            await anyio.to_thread.run_sync(self.cache.delete, key, content)
            return None
        known = self._known[identity] = KnownTools(key, tools, router)
        return known

    async def keep(self, key: str, tools: OfferedTools, root: PurePosixPath) -> None:
        """Keep the tools that a set-up has found. No tool may have been called in its sandbox."""
        content = _content(tools, root)

        def write() -> None:
            if self.cache.read(key) != content:
                self.cache.write(key, content)

        await anyio.to_thread.run_sync(write)

    async def evict(self, key: str, tools: OfferedTools, root: PurePosixPath) -> bool:
        """Delete the entry, if it still has these tools; whether it had them."""
        content = _content(replace(tools, changed={}), root)
        return await anyio.to_thread.run_sync(self.cache.delete, key, content)


def _content(tools: OfferedTools, root: PurePosixPath) -> bytes:
    return as_json(tools.to_json()).replace(_escaped(root), ROOT)


def _escaped(root: PurePosixPath) -> bytes:
    """The path as it is in JSON text."""
    return as_json(str(root))[1:-1]


@dataclass(slots=True)
class LocalTools:
    """Definitions of one suite's local tools; each is read from the suite's code once and kept in `known`."""

    known: dict[str, tuple[JsonObject, ...]] = field(default_factory=dict[str, tuple[JsonObject, ...]])
    _lock: anyio.Lock = field(default_factory=anyio.Lock)

    async def describe(
        self, suite: Suite, task: Task, driver: DriverClient, *, root: PurePosixPath, timeout_seconds: float
    ) -> ToolDescriptions:
        """The definitions of a task's local tools. Raises SetUpError if the suite's code fails."""
        needs = known_needs(suite.profile, task.needs.local_tools)
        async with self._lock:
            unknown = [need for need in needs if need not in self.known]
            if unknown:
                self.known.update(await _run_describe(suite.profile, unknown, driver, root, timeout_seconds))
        return {need: self.known[need] for need in needs}


async def _run_describe(
    profile: SuiteProfile,
    needs: Sequence[str],
    driver: DriverClient,
    root: PurePosixPath,
    timeout_seconds: float,
) -> ToolDescriptions:
    try:
        result = await driver.run(
            describe_command(profile, needs, root),
            cwd=str(root),
            env=dict(profile.environment),
            timeout_seconds=timeout_seconds,
            channel=True,
        )
        if result.exit_code == 0:
            return parse_descriptions(result.channel or "", needs)
        cause = result.stderr.strip()[-OUTPUT_TAIL:] or "it took too long"
    except (DriverError, SuiteError) as error:
        cause = error.message
    raise SetUpError(f"the local tools {', '.join(needs)} could not be described: {cause}")
