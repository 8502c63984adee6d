"""The probe suite, a server that serves it, and MCP clients that connect to the server.

The suite has an MCP server that starts quickly, with tools for tests, and tasks that succeed or fail in
different ways.
"""
