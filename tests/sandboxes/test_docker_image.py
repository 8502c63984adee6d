"""What is remembered of an engine's images."""

from __future__ import annotations

from typing import Any

import pytest

from decathlon_mcp.errors import ImageError
from decathlon_mcp.plugins.docker import image
from decathlon_mcp.plugins.docker.image import find_image, forget_image


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


def test_image_that_was_removed_is_inspected_again() -> None:
    """An engine that refuses a container for lack of its image makes the image forgotten."""
    engine: Any = Engine()
    digest_of(engine)
    engine.digest = None
    assert digest_of(engine) == "sha256:1"
    forget_image(engine, "image")
    with pytest.raises(ImageError, match="not on this engine"):
        digest_of(engine)
