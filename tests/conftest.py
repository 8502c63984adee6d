"""What every test may ask for."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, NoReturn, cast

import anyio
import pytest

from decathlon_mcp.sandboxes.docker.image import STARTER_IMAGE

BOUND_SECONDS = 180
"""What an asynchronous test may take on a slow machine; with a `timeout` of its own, a minute less."""


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One backend: the docker engine's attached socket and uvicorn are asyncio's."""
    return ("asyncio", {"use_uvloop": True})


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """No asynchronous test hangs for ever: it fails shortly before pytest-timeout ends the whole process.

    Inside the test's own coroutine: a cancel scope of a fixture would cancel the task that all tests share.
    """
    if iscoroutinefunction(test := pyfuncitem.obj):
        own = pyfuncitem.get_closest_marker("timeout")
        seconds = own.args[0] - 60 if own else BOUND_SECONDS

        @wraps(test)
        async def bounded(**arguments: Any) -> None:
            with anyio.fail_after(seconds):
                await test(**arguments)

        pyfuncitem.obj = bounded


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Any]:
    """The engine's API (`docker.APIClient`). Where none answers: skipped, but never in CI."""
    from docker import APIClient
    from docker.errors import DockerException
    from docker.utils import kwargs_from_env

    try:
        engine: Any = APIClient(**cast("dict[str, Any]", kwargs_from_env()), version="auto", timeout=30)
    except DockerException as error:
        _go_without(f"no Docker engine answers; on Debian: apt-get install docker.io ({error})")
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="session")
def test_image(docker_engine: Any) -> str:
    """The name of the tests' image. Where it has not been built: skipped, but never in CI."""
    from docker.errors import ImageNotFound

    try:
        docker_engine.inspect_image(STARTER_IMAGE)
    except ImageNotFound:
        _go_without(f"there is no image {STARTER_IMAGE}; make it with tests/image/build")
    return STARTER_IMAGE


@pytest.fixture
def docker_network(docker_engine: Any) -> Iterator[str]:
    """The name of a network of the engine's that leads nowhere else."""
    name = f"decathlon-test-{secrets.token_hex(4)}"
    identity = docker_engine.create_network(name, driver="bridge", internal=True)["Id"]
    try:
        yield name
    finally:
        docker_engine.remove_network(identity)


def _go_without(reason: str) -> NoReturn:
    if os.environ.get("DECATHLON_REQUIRE_DOCKER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
