"""decathlon-mcp: Toolathlon as an environment that any MCP client can play or train on."""

__version__ = "0.1.0"
