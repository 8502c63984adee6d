"""Reads tool calls from stdin, one JSON object a line, and writes their outcomes to stdout."""

import json
import os
import sys

import anyio


def write(**fields):
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def on_message(message):
    """Handler of a session's notifications: writes the method."""
    # Version 1 of the SDK wraps notifications in a model with the field `root`.
    method = getattr(getattr(message, "root", message), "method", None)
    if method is not None:
        write(notification=method)


async def lines_of_stdin():
    # A thread that reads stdin cannot be cancelled: a client that fails would wait for the next command.
    rest = b""
    while True:
        await anyio.wait_readable(0)
        if not (data := os.read(0, 65536)):
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


async def serve(call):
    """Pass each command to `call(tool, arguments)`, which returns a text and a structured result."""

    async def run(command):
        try:
            text, structured = await call(command["tool"], command["arguments"])
        except Exception as error:  # noqa: BLE001  (the test judges it)
            write(id=command["id"], error=f"{type(error).__name__}: {error}")
        else:
            write(id=command["id"], text=text, structured=structured)

    async with anyio.create_task_group() as tasks:
        write(connected=True)
        async for line in lines_of_stdin():
            tasks.start_soon(run, json.loads(line))
        tasks.cancel_scope.cancel()
