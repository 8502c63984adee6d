"""What every test may ask for."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One backend: the docker engine's attached socket and uvicorn are asyncio's."""
    return ("asyncio", {"use_uvloop": True})
