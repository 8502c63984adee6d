"""Runs all tests of the provider `gvisor`, some 200: `python -m tests.sandboxes.all_of_gvisor [OPTION...]`.

Requires `runsc` on the PATH, an engine and the tests' image. Options are those of pytest.
"""

from __future__ import annotations

import os
import sys

import pytest

if __name__ == "__main__":
    os.environ["DECATHLON_REQUIRE_GVISOR"] = "1"
    sys.exit(pytest.main(["-m", "gvisor", "tests", *sys.argv[1:]]))
