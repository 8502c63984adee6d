"""What is remembered of an engine's images."""

from __future__ import annotations

from typing import Any

import pytest

from decathlon_mcp.plugins.docker import image
from decathlon_mcp.plugins.docker.image import find_image


class Engine:
    """The part of the SDK's client that inspects images. `digest`: of every image, None if there is none."""

    def __init__(self, digest: str | None = "sha256:1") -> None:
        self.digest = digest

    def inspect_image(self, name: str) -> dict[str, Any]:
        if self.digest is None:
            raise image.ImageNotFound(name)
        return {"Id": self.digest, "Config": {}, "Size": 1}


def digest_of(api: Any) -> str:
    return find_image(api, "image").digest


def test_name_that_gets_another_image_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    digest_of(engine)
    assert digest_of(Engine("sha256:2")) == "sha256:2", "another engine has other images"
    engine.digest = "sha256:2"
    monkeypatch.setattr(image, "IMAGE_SECONDS", -1)
    assert digest_of(engine) == "sha256:2"
