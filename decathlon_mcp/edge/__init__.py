"""MCP and HTTP: the sole home of `mcp.server` and Starlette."""

from decathlon_mcp.edge.http import Hosts, http_app
from decathlon_mcp.edge.pipe import serve_pipe, serve_stdio
from decathlon_mcp.edge.serve import hosts_for, listen, serve_http
from decathlon_mcp.edge.tokens import Tokens, new_token

__all__ = [
    "Hosts",
    "Tokens",
    "hosts_for",
    "http_app",
    "listen",
    "new_token",
    "serve_http",
    "serve_pipe",
    "serve_stdio",
]
