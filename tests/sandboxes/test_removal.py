"""The removal of a sandbox, whatever its steps raise, and of a folder, whatever is in it."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.driver.client import connect
from decathlon_mcp.errors import SandboxLostError
from decathlon_mcp.plugins.docker import provider as docker_provider
from decathlon_mcp.plugins.docker.container import Container
from decathlon_mcp.sandboxes.host import processes as processes_module
from decathlon_mcp.sandboxes.host import sandbox as sandbox_module
from decathlon_mcp.sandboxes.host import sandbox_folder as resources_module
from decathlon_mcp.sandboxes.host.first_process import FirstProcess
from decathlon_mcp.sandboxes.host.namespaces import NamespaceSandbox
from decathlon_mcp.sandboxes.host.processes import ProcessSignaller
from decathlon_mcp.sandboxes.host.sandbox import Footprint
from decathlon_mcp.sandboxes.host.sandbox_folder import OWNER_FILE
from decathlon_mcp.sandboxes.streams import PipeStream
from tests.driver.peer import until
from tests.sandboxes.conftest import open_bench

ANOTHER_USER = 1_000_000
DEPTH = 1_500
"""Levels of folders: more than descriptors, and than Python's own limit on calls."""


# A folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "sandbox"
    folder.mkdir()
    (folder / OWNER_FILE).write_text("me")
    return folder


@contextmanager
def few_descriptors(spare: int) -> Generator[None]:
    """Only so many further files can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open("/", os.O_PATH)
    os.close(probe)
    open_files = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    fillers = [os.open("/", os.O_PATH) for _ in range(probe, open_files)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max([open_files, *fillers]) + 1 + spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for filler in fillers:
            os.close(filler)


def remove_folder(folder: Path, *, keep_last: bool = False) -> None:
    parent = os.open(folder.parent, os.O_PATH)
    try:
        resources_module.remove_folder(folder.name, parent, last=(OWNER_FILE,), keep_last=keep_last)
    finally:
        os.close(parent)


def as_another_user(work: Callable[[], object]) -> None:
    """Do the work in a process of an ordinary user, for whom permissions count."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(ANOTHER_USER)
                os.setuid(ANOTHER_USER)
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def make_deep(folder: Path) -> None:
    here = os.open(folder, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=here)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_a_folder_of_any_depth_is_removed_with_five_descriptors(folder: Path) -> None:
    make_deep(folder)
    with few_descriptors(5):
        remove_folder(folder)
    assert not folder.exists()


@pytest.mark.parametrize("mode", [0, 3, 5])
def test_folders_of_any_permissions_are_removed(mode: int) -> None:
    """Each is closed: the one at the top, one in the middle, and the one that has a file."""
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o777)
        folder = Path(base) / "sandbox"

        def work() -> None:
            inner = folder / "d" / "e" / "f"
            inner.mkdir(parents=True)
            for path in (inner, inner.parent, inner.parent.parent):
                (path / "x").write_text("")
            for path in (inner, inner.parent, inner.parent.parent, folder):
                path.chmod(mode << 6)
            remove_folder(folder)

        as_another_user(work)
        assert not folder.exists()


def test_links_are_removed_and_not_followed(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "file").write_text("mine")
    outside.chmod(0o500)
    (folder / "to-folder").symlink_to(outside)
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    (folder / "d").mkdir()
    (folder / "d" / "to-file").symlink_to(outside / "file")
    remove_folder(folder)
    link = tmp_path / "link"
    link.symlink_to(outside)
    remove_folder(link)
    assert not folder.exists()
    assert not link.is_symlink()
    assert (outside / "file").read_text() == "mine"
    assert (outside / "inner").is_dir()
    assert outside.stat().st_mode & 0o777 == 0o500
    outside.chmod(0o700)


def test_what_cannot_be_removed_leaves_the_owner_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "d" / "e").mkdir(parents=True)
    for path in (folder / "a", folder / "d" / "stays", folder / "d" / "e" / "b"):
        path.write_text("")
    unlink = os.unlink

    def refuse(path: Any, **options: Any) -> None:
        if path == "stays":
            raise OSError(errno.EBUSY, "busy")
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(OSError, match="busy"):
            remove_folder(folder)
    assert {path.name for path in folder.rglob("*")} == {OWNER_FILE, "d", "stays"}
    remove_folder(folder)
    assert not folder.exists()


def test_an_owner_that_was_replaced_by_a_folder_is_removed_too(folder: Path) -> None:
    (folder / OWNER_FILE).unlink()
    (folder / OWNER_FILE / "d").mkdir(parents=True)
    remove_folder(folder)
    assert not folder.exists()
    remove_folder(folder)


# A sandbox


ERRORS: list[Callable[[], BaseException]] = [
    lambda: OSError(errno.EBUSY, os.strerror(errno.EBUSY)),
    lambda: SandboxLostError("the sandbox is gone"),
    asyncio.CancelledError,
]

PROCESS_STEPS = (
    (PipeStream, "aclose"),
    (FirstProcess, "read_log"),
    (sandbox_module, "remove_folder"),
)
STEPS: dict[str, tuple[tuple[Any, str], ...]] = {
    "plain": (
        *PROCESS_STEPS,
        (processes_module, "living_members"),
        (ProcessSignaller, "kill"),
        (Footprint, "_release"),
    ),
    "namespaces": ((NamespaceSandbox, "_release"),),
    "docker": (
        (Container, "close_socket"),
        (Container, "remove"),
        (docker_provider.DockerProvider, "_try_to_remove"),
    ),
}


def cases() -> list[Any]:
    return [
        pytest.param(
            kind,
            owner,
            name,
            id=f"{kind}-{owner.__name__.rpartition('.')[2]}-{name}",
            marks=pytest.mark.docker if kind == "docker" else (),
        )
        for kind, steps in STEPS.items()
        for owner, name in steps
    ]


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.parametrize(("kind", "owner", "name"), cases())
async def test_a_removal_that_fails_ends_nothing_else_and_is_done_by_the_next_sweep(
    kind: str,
    owner: Any,
    name: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(docker_provider, "REMOVE_RETRY_SECONDS", (0.01,))
    step = getattr(owner, name)
    with anyio.fail_after(120):
        async with (
            open_bench(kind, request, tmp_path) as bench,
            bench.provider.open(bench.spec()) as other,
            connect(other) as driver,
        ):
            for make_error in ERRORS:
                caplog.clear()

                def fail(*arguments: Any, make_error: Any = make_error, **options: Any) -> Any:
                    # What is open in these steps, nobody else would close.
                    if name == "_release":
                        step(*arguments, **options)
                    raise make_error()

                async def fail_later(stream: Any, make_error: Any = make_error) -> None:
                    await step(stream)
                    raise make_error()

                result = None
                with pytest.MonkeyPatch.context() as patch:
                    async with bench.provider.open(bench.new_spec()):
                        patch.setattr(owner, name, fail_later if name == "aclose" else fail)
                        result = "verdict"
                assert result == "verdict"
                assert {record.levelname for record in caplog.records} & {"ERROR", "WARNING"}, make_error
                await driver.ping()
            # What is left is removed by the next sweep, but not what plays.
            await bench.provider.sweep(bench.owner)
            await driver.ping()
    gc.collect()  # within the filter of this test


@pytest.mark.anyio
async def test_removal_by_another_server_that_dies_after_its_first_signals_leaves_no_stopped_process(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with (
        open_bench("namespaces", request, tmp_path) as bench,
        bench.provider.open(bench.spec()) as sandbox,
    ):
        assert isinstance(sandbox, NamespaceSandbox)
        async with connect(sandbox):
            members = processes_module.living_members(sandbox.leader)
            assert sandbox.leader in members
            processes_module.SignalJob(sandbox.leader, kill=True).advance(0.0)  # and then nothing
            await until(lambda: not any(map(processes_module.is_alive, members)))
