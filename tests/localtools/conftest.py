"""One server for all tests of a module, with a suite that has local tools."""

from __future__ import annotations

from pathlib import Path

from tests.probe.serving import module_server

SUITE = str(Path(__file__).parent / "suite")


served = module_server(suite=(SUITE,), provider="host")
