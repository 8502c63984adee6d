"""Guards the network of programs under test: what is not loopback is refused and recorded.

A preloaded library refuses connections, datagrams and look-ups of names in the C library, so that programs in
Python, Node and Rust are guarded alike. Requires Linux and a C compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("guard.c")


@dataclass(frozen=True, slots=True)
class NetworkGuard:
    """The compiled library and the file in which attempts are recorded."""

    library: Path
    log: Path

    @classmethod
    def compile(cls, folder: Path) -> NetworkGuard:
        """Compile the library in `folder`.

        Without a C compiler the test is skipped, or fails with DECATHLON_REQUIRE_COMPILER=1.
        """
        if shutil.which("cc") is None and os.environ.get("DECATHLON_REQUIRE_COMPILER") != "1":
            pytest.skip("the network guard requires cc; on Debian: apt-get install gcc libc6-dev")
        library = folder / "guard.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SOURCE, "-ldl"], check=True
        )
        return cls(library, folder / "attempts.log")

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which a program and its children are guarded."""
        return {"LD_PRELOAD": str(self.library), "DECATHLON_GUARD_LOG": str(self.log)}

    def take_attempts(self) -> Counter[str]:
        """What was refused since the last call, such as `lookup api.openai.com`, and how often."""
        attempts = Counter(self.log.read_text().splitlines()) if self.log.exists() else Counter[str]()
        self.log.unlink(missing_ok=True)
        return attempts
