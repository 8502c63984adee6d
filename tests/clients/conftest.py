"""Clients over HTTP, with a server on a real socket in this process, and with an embedded server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from decathlon_client import Decathlon

from tests.probe.serving import SUITE, Served, module_server

served = module_server(provider="host")


@pytest.fixture(scope="module", params=["http", "embedded"])
async def d(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, served: Served
) -> AsyncGenerator[Decathlon]:
    """A client of the same suite, over HTTP and embedded."""
    if request.param == "embedded":
        settings: dict[str, Any] = {"isolation": "none", "drain_seconds": 5}
        client = Decathlon.embedded(SUITE, "host", state=tmp_path_factory.mktemp("embedded"), **settings)
    else:
        client = Decathlon(served.url)
    async with client as d:
        yield d
