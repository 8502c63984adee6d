"""Runs all tests of the provider `gvisor`, some 200: `python -m tests.sandboxes.all_of_gvisor [OPTION...]`.

Requires `runsc` on the PATH, an engine and the tests' image. Options are those of pytest.
"""

from __future__ import annotations

import os
import sys

import pytest

FOLDERS = ("tests/cheats", "tests/sandboxes", "tests/conformance")

if __name__ == "__main__":
    os.environ["DECATHLON_REQUIRE_GVISOR"] = "1"
    # With the long ones, which the tests' configuration leaves out.
    sys.exit(pytest.main(["-m", "", "-k", "gvisor", *FOLDERS, *sys.argv[1:]]))
