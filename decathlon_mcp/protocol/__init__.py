"""MCP over HTTP and lines: messages, requests, sessions, the services and the lobby."""
