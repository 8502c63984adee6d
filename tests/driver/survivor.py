"""Server process of a test, which is killed: opens or takes back a local sandbox and calls a tool in it.

`python -m tests.driver.survivor JSON` with `owner`, `folder`, `log`, `generation` and what to do. Writes JSON
objects into the log, one a line, before and after each call. See `test_survival`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import anyio

from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, Survival, connect
from decathlon_mcp.driver.replies import Reply
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.types import JsonObject
from tests.fakes.calls import call_server

SURVIVE_SECONDS = 60


def spec_of(name: str) -> SandboxSpec:
    return SandboxSpec(name, BOOT_COMMAND, PurePosixPath("/episode"), survives=True)


class Log:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, **entry: Any) -> None:
        os.write(self._fd, json.dumps(entry).encode() + b"\n")


async def call(
    driver: DriverClient, log: Log, tool: str, *, kill_at: str | None, request_id: int | None = None
) -> None:
    """Call a tool of the server `counting`, and kill this process at a moment of the call."""

    def on_outcome(outcome: Any) -> None:
        if not isinstance(outcome, Reply):
            return
        if kill_at == "reply":
            os.kill(os.getpid(), signal.SIGKILL)
        log.write(reply=outcome.decoded())
        if kill_at == "logged":
            os.kill(os.getpid(), signal.SIGKILL)

    number = driver.new_request_id() if request_id is None else request_id
    log.write(call=number, tool=tool)
    params: JsonObject = {"name": tool, "arguments": {}}
    try:
        await call_server(driver, "counting", params, request_id=number, on_outcome=on_outcome)
    except DecathlonError as error:
        log.write(error=error.message)


async def first(arguments: dict[str, Any], log: Log) -> None:
    """Open the sandbox, start its server, call `arguments["tool"]`, and wait to be killed."""
    survival = Survival(arguments.get("survive_seconds", SURVIVE_SECONDS), 1)
    provider = HostProvider(arguments["owner"], Path(arguments["folder"]), isolation="none")
    async with provider, provider.open(spec_of(arguments["name"])) as sandbox:
        async with connect(sandbox, survival=survival) as driver:
            await driver.define([arguments["server"]])
            await driver.start([arguments["server"]["name"]], deadline_seconds=30)
            log.write(ready=True)
            await call(driver, log, arguments["tool"], kill_at=arguments.get("kill_at"))
            await anyio.sleep_forever()


async def second(arguments: dict[str, Any], log: Log) -> None:
    """Take the sandbox back and send the call again."""
    survival = Survival(SURVIVE_SECONDS, arguments["generation"])
    provider = HostProvider(arguments["owner"] + "-next", Path(arguments["folder"]), isolation="none")
    unanswered = arguments["unanswered"]
    async with provider, provider.reattach(arguments["owner"], spec_of(arguments["name"])) as sandbox:
        async with connect(sandbox, survival=survival, reattached=True, unanswered=unanswered) as driver:
            # The old replies arrive before they are asked for.
            await driver.ping()
            await anyio.sleep(0.2)
            await call(driver, log, arguments["tool"], kill_at=None, request_id=arguments["call"])
            await call(driver, log, "count", kill_at=None)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    log = Log(arguments["log"])
    anyio.run(first if arguments["generation"] == 1 else second, arguments, log)


if __name__ == "__main__":
    main()
