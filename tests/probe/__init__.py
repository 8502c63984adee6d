"""The probe suite, a server that serves it, and MCP clients that connect to the server.

The suite has one quick MCP server whose tools do what tests need, and tasks that succeed and fail.
"""
