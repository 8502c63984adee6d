"""MCP: handlers, results, sessions, the lobby. The only package that imports `mcp.server`."""
