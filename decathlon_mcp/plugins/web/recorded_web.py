"""The recorded web of an episode: connects its sandboxes to the recording proxy, and counts their requests.

A sandbox has no network. Two ways lead out of it, both over the connection to its driver:

- a port of its loopback, which the variables for a proxy name;
- ports 80 and 443 of its loopback, to which every host name leads, for programs that ignore these variables.

Sandboxes that share the loopback of the machine (`--isolation none`) have the first way only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import ByteStream, SocketAttribute

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.extensions import EpisodeResource, SandboxRole
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import DriverError, SettingsError, SetUpError
from decathlon_mcp.payloads import source
from decathlon_mcp.plugins.settings import WebSettings
from decathlon_mcp.plugins.tunnels import forward, relay, resolve
from decathlon_mcp.plugins.web.exchanges import (
    Configuration,
    Listener,
    Mode,
    SessionSpec,
    parse_addresses,
)
from decathlon_mcp.plugins.web.proxy import WebProxy, find_program, running_proxy
from decathlon_mcp.plugins.web.recording import (
    FOLDER,
    Recording,
    RecordingError,
    RecordingId,
    revisions,
)
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.settings import Settings
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

log = logging.getLogger("decathlon.web")

PROXY_PORT = 8899
"""Port of a sandbox's loopback that leads to the proxy."""
TRUST_FOLDER = ".decathlon-web"
"""Folder with the authority's certificate, in the suite's root in a sandbox and outside of the workspace."""
PREPARE_SECONDS = 120.0
NOT_PROXIED = "localhost,127.0.0.1"
"""What programs reach directly: task servers and services at the sandbox's own ports."""
BUNDLE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT")


class RecordedWeb:
    """The recorded web of a server, as `episodes.extensions.Web`. `state`: the state folder."""

    def __init__(self, settings: WebSettings, mode: Mode, state: Path) -> None:
        self._settings = settings
        self._mode: Mode = mode
        self._state = state
        self._proxy: WebProxy | None = None

    @property
    def reaches_sites(self) -> bool:
        return self._mode != "replay"

    def missing(self, suite: Suite, task: Task) -> str:
        """Why a task cannot be replayed: of which revision a recording is missing, and which there are."""
        if self.reaches_sites:
            return ""
        folder, wanted = self._state / FOLDER, recording_id(suite, task)
        if wanted.path(folder).is_file():
            return ""
        others = revisions(folder, suite.name, task.id)
        found = f"; there are recordings of {', '.join(others)}" if others else ""
        return (
            f"needs a recording of its web for revision {wanted.revision} of the suite{found}: play it once "
            "with `--web record`"
        )

    def launch_time(self, suite: Suite, task: Task) -> datetime | None:
        """The launch time that a task's recording fixes, None without a recording. Blocks."""
        path = recording_id(suite, task).path(self._state / FOLDER)
        if not path.is_file():
            return None
        try:
            with Recording(path) as recording:
                return recording.launch_time
        except RecordingError as error:
            log.warning("a recording cannot be read", extra=fields(why=str(error)))
            return None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run the proxy. Raises SettingsError if its program is missing or does not start."""
        settings = self._settings
        try:
            addresses = parse_addresses(settings.web_address)
        except ValueError as error:
            raise SettingsError(str(error)) from None
        if settings.web_authorities is not None and not settings.web_authorities.expanduser().is_file():
            raise SettingsError(f"--web-authorities {settings.web_authorities} is not a file")
        configuration = Configuration(
            addresses, settings.web_response_mib << 20, settings.web_recording_mib << 20
        )
        program = find_program(settings.web_proxy)
        async with running_proxy(
            program, self._state, configuration, settings.web_authorities
        ) as self._proxy:
            yield

    @asynccontextmanager
    async def episode(
        self, factory: SandboxFactory, task: Task, episode: str, launch_time: datetime
    ) -> AsyncGenerator[RecordedEpisodeWeb]:
        """The web of one episode; its sessions end on exit. Raises SetUpError without a recording."""
        assert self._proxy is not None, "the proxy runs"
        suite = factory.suite
        folder, belongs_to = self._state / FOLDER, recording_id(suite, task)
        if self.reaches_sites:
            create = partial(Recording.create, max_bytes=self._settings.web_recording_mib << 20)
            try:
                recording = await anyio.to_thread.run_sync(create, folder, belongs_to, launch_time)
                recording.close()
            except RecordingError as error:
                raise SetUpError(f"the recording cannot be written: {error}") from error
        elif reason := self.missing(suite, task):
            raise SetUpError(reason)
        web = RecordedEpisodeWeb(
            factory, task, self._proxy, self._mode, episode, str(belongs_to.path(folder))
        )
        try:
            yield web
        finally:
            with anyio.CancelScope(shield=True):
                await web.close()


class RecordedEpisodeWeb(EpisodeResource):
    """The web of one episode's sandboxes. `episode` names it in its recording."""

    def __init__(
        self,
        factory: SandboxFactory,
        task: Task,
        proxy: WebProxy,
        mode: Mode,
        episode: str,
        recording: str,
    ) -> None:
        self._factory = factory
        self._task = task
        self._proxy = proxy
        self._mode: Mode = mode
        self._episode = episode
        self._recording = recording
        self._sandboxes = 0

    @asynccontextmanager
    async def attached(
        self, sandbox: Sandbox, driver: DriverClient, role: SandboxRole, reattached: bool
    ) -> AsyncGenerator[None]:
        """Connect a sandbox that uses the web to the proxy, and make its programs use and trust it."""
        if role == "service" or not self._factory.uses_web(self._task, role):
            yield
            return
        shares_loopback = self._factory.provider.shares_loopback(sandbox.spec)
        # Elsewhere the files belong to the machine, or to an image that other sandboxes use too.
        has_own_files = self._factory.provider.isolation == "container"
        self._sandboxes += 1
        session = f"{self._episode}-{role}-{self._sandboxes}"
        spec = SessionSpec(session, self._episode, role, self._mode, self._recording)
        try:
            await self._proxy.open(spec)
        except OSError as error:
            raise SetUpError(f"the recorded web is not available: {error}") from error
        folder = sandbox.root / TRUST_FOLDER
        async with AsyncExitStack() as stack:
            if shares_loopback:
                port = await stack.enter_async_context(self._listening(session))
            else:
                await self._forward(driver, session)
                port = PROXY_PORT
            if not reattached:
                resolves = not shares_loopback and await _resolves(driver)
                await self._install(sandbox, driver, system=has_own_files, resolver=resolves)
            driver.set_environment(proxy_variables(port, str(folder)))
            yield

    async def facts(self) -> JsonObject:
        """How the requests were answered, unless the proxy does not answer."""
        try:
            report = await self._proxy.counts(self._episode)
        except OSError as error:
            log.warning("requests could not be counted", extra=fields(episode=self._episode, why=str(error)))
            return {}
        return {"web": {"mode": self._mode, **asdict(report.counts), "problem": report.problem}}

    async def close(self) -> None:
        """End the sessions; the recording notes how many requests it answered."""
        try:
            report = await self._proxy.close(self._episode)
        except OSError as error:
            log.warning("the sessions of the web did not end", extra=fields(why=str(error)))
            return
        if report.problem:
            log.warning(
                "not everything was recorded", extra=fields(episode=self._episode, why=report.problem)
            )

    async def _forward(self, driver: DriverClient, session: str) -> None:
        await forward(driver, {PROXY_PORT: partial(self._proxy.connect, session, "proxy")})
        by_name: tuple[tuple[int, Listener], ...] = ((80, "http"), (443, "https"))
        for port, listener in by_name:
            try:
                await forward(driver, {port: partial(self._proxy.connect, session, listener)})
            except DriverError as error:
                # A user without the privilege, or a program of the image that listens there.
                log.info("programs without a proxy setting have no web", extra=fields(why=error.message))

    @asynccontextmanager
    async def _listening(self, session: str) -> AsyncGenerator[int]:
        """Listen on the machine's loopback for a sandbox that shares it; yields the port."""

        async def handle(client: ByteStream) -> None:
            async with client:
                try:
                    target = await self._proxy.connect(session, "proxy")
                except OSError as error:
                    log.warning("no connection to the web proxy", extra=fields(why=str(error)))
                    return
                await relay(client, target)

        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        async with listener, background_tasks() as tasks:
            tasks.start_soon(listener.serve, handle)
            yield listener.extra(SocketAttribute.local_port)

    async def _install(self, sandbox: Sandbox, driver: DriverClient, *, system: bool, resolver: bool) -> None:
        order = {
            "authority": self._proxy.authority,
            "folder": str(sandbox.root / TRUST_FOLDER),
            # Where images keep Python environments, and where uv keeps its tools.
            "search": ["/usr/lib", "/usr/local", "/opt", "/root", "/home", str(sandbox.root)],
            "system": system,
            "resolver": resolver,
        }
        result = await driver.run(
            ["python3", "-c", source("trust", __package__), json.dumps(order)],
            cwd="/",
            timeout_seconds=PREPARE_SECONDS,
        )
        if result.exit_code != 0:
            output = result.stderr.strip()[-2000:] or "it took too long"
            raise SetUpError(f"the sandbox cannot be made to trust the web proxy: {output}")


def create(settings: Settings) -> RecordedWeb | None:
    """The recorded web of a server with these settings; None without `--web`. Raises SettingsError."""
    own = settings.of(WebSettings)
    if own.web is None:
        return None
    if settings.network != "auto":
        raise SettingsError(
            f"--web is for sandboxes without a network: leave out --network {settings.network}"
        )
    return RecordedWeb(own, own.web, settings.state)


def proxy_variables(port: int, folder: str) -> Mapping[str, str]:
    """Environment variables by which programs use the proxy, and trust its authority."""
    proxy = f"http://127.0.0.1:{port}"
    variables = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy)
    variables |= dict.fromkeys(("NO_PROXY", "no_proxy"), NOT_PROXIED)
    variables |= dict.fromkeys(BUNDLE_VARIABLES, f"{folder}/bundle.pem")
    # Node adds the certificate to its own list. From version 24 (22.21) on, it reads the variables for a
    # proxy if the second is set.
    return {**variables, "NODE_EXTRA_CA_CERTS": f"{folder}/authority.pem", "NODE_USE_ENV_PROXY": "1"}


async def _resolves(driver: DriverClient) -> bool:
    try:
        await resolve(driver)
    except DriverError as error:
        log.info("host names are not resolved in the sandbox", extra=fields(why=error.message))
        return False
    return True


def recording_id(suite: Suite, task: Task) -> RecordingId:
    """What the recording of a task belongs to. Blocks: runs git."""
    # Without the digest of local changes: a key that is filled in to record would change it.
    return RecordingId(suite.name, suite.revision_of(task).partition("-")[0], task.id)


def recorded_note(settings: Settings, suite: Suite, task: Task) -> tuple[str, JsonObject] | None:
    """What `tasks --check` tells of a recording of this revision. Blocks. Raises SettingsError."""
    folder = settings.state / FOLDER
    # Running git takes longer than this, and most tasks have none.
    if not revisions(folder, suite.name, task.id):
        return None
    path = recording_id(suite, task).path(folder)
    if not path.is_file():
        return None
    try:
        with Recording(path) as recording:
            summary = recording.summary()
    except RecordingError as error:
        raise SettingsError(str(error)) from None
    members = {"hit_rate": summary.rate, "runnable": summary.runnable}
    return f"recorded: {summary.rate_text}", {"recorded": members}
