"""Sandboxes in namespaces, and images in folders."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath

import anyio
import pytest

from decathlon_mcp.errors import (
    BadRequestError,
    ImageError,
    LimitExceededError,
    NotRunnableError,
    ProviderUnavailableError,
)
from decathlon_mcp.plugins.conformance.target import file_entry, pack, receive_all
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.sandboxes.host import command as bubblewrap_command
from decathlon_mcp.sandboxes.host.cgroups import Hierarchies
from tests.sandboxes.conftest import Bench, open_to_everyone

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

REFUSED_CALLS = """
import ctypes, errno, os, platform
libc = ctypes.CDLL(None, use_errno=True)
numbers = {
    "x86_64": {"mount": 165, "unshare": 272, "setns": 308, "keyctl": 250, "bpf": 321, "reboot": 169,
               "perf_event_open": 298, "userfaultfd": 323, "chroot": 161, "kexec_load": 246, "syslog": 103},
    "aarch64": {"mount": 40, "unshare": 97, "setns": 268, "keyctl": 219, "bpf": 280, "reboot": 142,
                "perf_event_open": 241, "userfaultfd": 282, "chroot": 51, "kexec_load": 104, "syslog": 116},
}[platform.machine()]
numbers |= {"io_uring_setup": 425, "open_tree": 428, "pidfd_getfd": 438}
for name, number in numbers.items():
    if not (libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM):
        print(name, "is not refused")
for number in (435, 463, 1000):
    if not (libc.syscall(number, 0, 0) == -1 and ctypes.get_errno() == errno.ENOSYS):
        print(number, "is not missing")
CLONE_NEWUSER, ADDR_NO_RANDOMIZE, AF_VSOCK = 0x10000000, 0x40000, 40
clone, personality = {"x86_64": (56, 135), "aarch64": (220, 92)}[platform.machine()]
for call in (
    lambda: libc.syscall(clone, CLONE_NEWUSER | 17, 0, 0, 0, 0),
    lambda: libc.syscall(personality, ADDR_NO_RANDOMIZE),
    lambda: libc.socket(AF_VSOCK, 1, 0),
):
    if not (call() == -1 and ctypes.get_errno() == errno.EPERM):
        print("not refused")
if libc.syscall(personality, 0xFFFFFFFF) != 0:
    print("the personality cannot be read")
os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
print("done")
"""


async def output_of(sandbox: Sandbox) -> str:
    return (await receive_all(sandbox)).decode()


async def test_calls_that_docker_refuses_are_refused(bubblewrap: Bench) -> None:
    async with bubblewrap.provider.open(bubblewrap.python_spec(REFUSED_CALLS)) as sandbox:
        assert await output_of(sandbox) == "done\n", sandbox.log_tail


@pytest.mark.parametrize("bench", ["image", "gvisor"], indirect=True)
async def test_image_cannot_be_changed_by_its_sandboxes(bench: Bench) -> None:
    script = """
import os
with open(os.path.expanduser("~/.profile"), "a") as file:
    file.write("# changed")  # of the sandbox's own home
for path in ("/file", "/usr/file", "/etc/passwd"):
    try:
        open(path, "a")
        print(path, "was opened")
    except OSError:
        pass
print(os.getpid(), os.getuid(), os.listdir("/tmp"))
"""
    async with bench.provider.open(bench.python_spec(script)) as sandbox:
        assert await output_of(sandbox) == "1 0 []\n"
    profile = Path(str(bench.image)) / "rootfs/root/.profile"
    assert "# changed" not in await anyio.Path(profile).read_text()


async def test_what_cannot_be_limited_is_reported(bubblewrap: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hierarchies, "of_this_process", lambda: Hierarchies({}))
    provider = bubblewrap.create_second()
    # Root needs a capability for a limit on processes, which it lacks in some containers.
    assert provider.unlimited in (("memory", "cpus"), ("memory", "cpus", "pids"))
    async with provider:
        (limited,) = [found for found in await provider.check(bubblewrap.image) if found.what == "limits"]
        assert limited.detail.startswith(f"no limit on {', '.join(provider.unlimited)}:")


async def test_files_go_to_the_writable_folders_and_must_fit(bubblewrap: Bench) -> None:
    async with bubblewrap.provider.open(bubblewrap.new_spec()) as sandbox:
        with pytest.raises(BadRequestError, match="at or below /episode, "):
            await sandbox.put(PurePosixPath("/usr/lib"), pack(file_entry("file")))
        with pytest.raises(BadRequestError):
            await sandbox.put(PurePosixPath("/tmp"), pack(file_entry("file")))
        await sandbox.put(PurePosixPath("/root/.config"), pack(file_entry("file")))
        with pytest.raises(LimitExceededError, match="do not fit"):
            await sandbox.put(sandbox.root, pack(file_entry("large", bytes(300 << 20))))


async def test_outbound_network_and_unsuitable_images_are_refused(bubblewrap: Bench, tmp_path: Path) -> None:
    with pytest.raises(NotRunnableError, match="--provider docker"):
        async with bubblewrap.provider.open(bubblewrap.spec(network="outbound")):
            pass
    assert bubblewrap.image is not None
    for image, command, message in (
        (str(tmp_path), "python3", "is no unpacked image"),
        ("sha256:" + "0" * 64, "python3", "is not the one"),
    ):
        with pytest.raises(ImageError, match=message):
            async with bubblewrap.provider.open(bubblewrap.spec(command, image=image)):
                pass


async def test_failure_of_bubblewrap_is_reported(
    bubblewrap: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_to_everyone() as folder:
        program = folder / "bwrap"
        program.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2\nexit 1\n")
        program.chmod(0o755)
        monkeypatch.setattr(bubblewrap_command, "PROGRAM", str(program))
        await assert_failure_is_reported(bubblewrap)
    assert "Creating new namespace failed" in str([vars(record) for record in caplog.records])
    monkeypatch.setattr(bubblewrap_command, "PROGRAM", "no-such-program")
    async with bubblewrap.create_second() as provider:
        (found,) = await provider.check(bubblewrap.image)
        assert "apt-get install bubblewrap" in found.cure


async def assert_failure_is_reported(bubblewrap: Bench) -> None:
    async with bubblewrap.create_second() as provider:
        with pytest.raises(ProviderUnavailableError, match="bubblewrap created no sandbox"):
            async with provider.open(bubblewrap.spec()):
                pass
        (*_, found) = await provider.check(bubblewrap.image)
        assert "Creating new namespace failed" in found.detail
        assert "user namespaces" in found.cure


async def test_an_ordinary_user_can_open_sandboxes(unpacked_image: str) -> None:
    """The program becomes one if the tests run as root."""
    command = [sys.executable, "-m", "tests.sandboxes.unprivileged", "image", unpacked_image]
    result = await anyio.run_process(command, check=False)
    assert result.stdout == b"all passed\n", result.stderr.decode()
