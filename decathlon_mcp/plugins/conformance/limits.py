"""Checks that what a spec limits is limited, and that a program that an image lacks is an error."""

from __future__ import annotations

from dataclasses import replace

from decathlon_mcp.errors import ImageError
from decathlon_mcp.plugins.conformance.target import ProviderUnderTest, raises, receive_all, registered
from decathlon_mcp.sandboxes.base import OUT_OF_MEMORY, LimitName, Limits

FILL_MEMORY = "blocks = []\nwhile True: blocks.append(b'x' * (1 << 20))"
START_PROCESSES = """
import os, time
count = 0
try:
    while count < 100:
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
except OSError as error:
    print(error.strerror, count < 20)
"""


@registered(commands=True)
async def memory_over_the_limit_is_the_cause_of_end(target: ProviderUnderTest) -> None:
    """A first process that the kernel kills at the limit on memory has that as the cause of its end."""
    if _limits(target, "memory"):
        spec = replace(target.python_spec(FILL_MEMORY), limits=Limits(memory_mib=64))
        async with target.provider.open(spec) as sandbox:
            await receive_all(sandbox)
            assert await sandbox.cause_of_end() == OUT_OF_MEMORY


@registered(commands=True)
async def number_of_processes_is_limited(target: ProviderUnderTest) -> None:
    """A sandbox can start as many processes as its spec says, and no more."""
    if _limits(target, "pids"):
        spec = replace(target.python_spec(START_PROCESSES), limits=Limits(memory_mib=256, pids=16))
        async with target.provider.open(spec) as sandbox:
            assert await receive_all(sandbox) == b"Resource temporarily unavailable True\n"


@registered(commands=True)
async def missing_program_is_an_error_and_leaves_nothing(target: ProviderUnderTest) -> None:
    """A program that the image does not have is an ImageError that names it."""
    with raises(ImageError, "no-such-program"):
        async with target.provider.open(target.new_spec(("no-such-program",))):
            pass
    await target.assert_nothing_left()


def _limits(target: ProviderUnderTest, name: LimitName) -> bool:
    return target.provider.isolation != "none" and name not in target.provider.unlimited
