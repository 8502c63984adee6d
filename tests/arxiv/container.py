"""The stand-in for arXiv as a container of a network, where it answers to arXiv's names."""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.arxiv.authority import Authority

PROGRAM = Path(__file__).with_name("answering.py")
NAMES = ("arxiv.org", "www.arxiv.org", "export.arxiv.org")


@contextmanager
def arxiv(
    engine: Any, image: str, network: str, papers: list[dict[str, Any]], authority: Authority
) -> Generator[None]:
    """It answers for as long as the context lasts; `image` needs a Python."""
    told = json.dumps({"papers": papers, "identity": authority.identity(NAMES)})
    endpoint = engine.create_endpoint_config(aliases=list(NAMES))
    made = engine.create_container(
        image,
        ["python3", "-c", PROGRAM.read_text(), told],
        name=f"decathlon-test-arxiv-{secrets.token_hex(4)}",
        networking_config=engine.create_networking_config({network: endpoint}),
        host_config=engine.create_host_config(network_mode=network),
    )["Id"]
    try:
        engine.start(made)
        said: Iterator[bytes] = engine.logs(made, stream=True, follow=True)
        first = next(said, b"")
        assert first == b"listening\n", (first, *said)
        yield
    finally:
        engine.remove_container(made, v=True, force=True)
