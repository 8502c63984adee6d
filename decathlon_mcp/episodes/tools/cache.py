"""The cache of tool lists: tools that are known before a task's servers run.

A list is kept under a key of everything that normally decides it: the suite's revision, the image, the task
and its servers' configurations with their templates unfilled. No credential is in the key. A list is written
only by a set-up that has started the servers, before any tool can be called, so that no agent can write one.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import PurePosixPath

import anyio
import anyio.to_thread

from decathlon_mcp import __version__
from decathlon_mcp.episodes.tools.offered import OfferedTools, offered_tools
from decathlon_mcp.sandboxes.base import Provider
from decathlon_mcp.storage.kept_tools import CachedLists
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import Names, as_json

log = logging.getLogger("decathlon.episodes")
ROOT = b"\\u0000root\\u0000"
"""Stands in a file for the suite's root in the sandbox, which some providers choose for each sandbox. As JSON
text; no server has NUL in a description."""
MEMO_SECONDS = 2.0
"""How long an answer before the set-up may rely on the revision and the image that an earlier episode of the
task has found. The set-up looks again, at what it uses."""


@dataclass(frozen=True)
class ToolLists:
    """The cached tool lists of one suite."""

    cache: CachedLists
    suite: Suite
    provider: Provider
    image: str | None
    names: Names
    _expected_keys: dict[str, tuple[float, str | None]] = field(default_factory=dict, repr=False)

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
        servers, local_code = self.suite.servers, dict(self.suite.profile.local_code)
        configurations = [
            # A server without a file fails the set-up.
            {**asdict(servers[name]), "file": servers[name].file.name} if name in servers else None
            for name in task.needs.servers
        ]
        decisive = {
            "version": __version__,
            "suite": self.suite.name,
            "revision": revision,
            "environment": environment,
            "task": task.id,
            "servers": configurations,
            "local_tools": {name: local_code.get(name) for name in task.needs.local_tools},
        }
        return sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()

    async def find(self, key: str, root: PurePosixPath) -> OfferedTools | None:
        """The tools under a key, for a sandbox with that root."""
        content = await anyio.to_thread.run_sync(self.cache.read, key)
        if content is None:
            return None
        try:
            return offered_tools(content.replace(ROOT, _escaped(root)), self.names)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("a cached tool list cannot be read", extra=fields(suite=self.suite.name))
            await anyio.to_thread.run_sync(self.cache.delete, key, content)
            return None

    async def keep(self, key: str, tools: OfferedTools, root: PurePosixPath) -> None:
        """Keep the tools that a set-up has found. No tool may have been called in its sandbox."""
        await anyio.to_thread.run_sync(self.cache.write, key, _content(tools, root))

    async def forget(self, key: str, tools: OfferedTools, root: PurePosixPath) -> None:
        """Delete the entry, if it still has these tools."""
        await anyio.to_thread.run_sync(self.cache.delete, key, _content(tools, root))


def _content(tools: OfferedTools, root: PurePosixPath) -> bytes:
    return as_json(tools.to_json()).replace(_escaped(root), ROOT)


def _escaped(root: PurePosixPath) -> bytes:
    """The path as it is in JSON text."""
    return as_json(str(root))[1:-1]
