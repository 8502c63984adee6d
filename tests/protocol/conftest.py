"""The fixtures of the tests of MCP are those of the tests over HTTP."""

from tests.http.conftest import http, served

__all__ = ["http", "served"]
