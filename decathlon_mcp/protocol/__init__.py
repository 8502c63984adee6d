"""MCP: handlers, results, sessions, the lobby. Only this package and `http` import `mcp.server`."""
