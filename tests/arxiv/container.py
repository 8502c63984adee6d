"""Runs the fake arXiv server in a container with arXiv's host names."""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.arxiv.authority import Authority

PROGRAM = Path(__file__).with_name("arxiv_server.py")
NAMES = ("arxiv.org", "www.arxiv.org", "export.arxiv.org")


@contextmanager
def arxiv(
    engine: Any, image: str, network: str, papers: list[dict[str, Any]], authority: Authority
) -> Generator[None]:
    """Serve these papers until the context exits. `image` must have Python."""
    config = json.dumps({"papers": papers, "identity": authority.identity(NAMES)})
    endpoint = engine.create_endpoint_config(aliases=list(NAMES))
    container = engine.create_container(
        image,
        ["python3", "-c", PROGRAM.read_text(), config],
        name=f"decathlon-test-arxiv-{secrets.token_hex(4)}",
        networking_config=engine.create_networking_config({network: endpoint}),
        host_config=engine.create_host_config(network_mode=network),
    )["Id"]
    try:
        engine.start(container)
        log: Iterator[bytes] = engine.logs(container, stream=True, follow=True)
        first_line = next(log, b"")
        assert first_line == b"listening\n", (first_line, *log)
        yield
    finally:
        engine.remove_container(container, v=True, force=True)
