"""Entry point of the bundle: runs `decathlon-mcp stdio --url` from the wheel in the same folder."""

from decathlon_mcp.cli import main

main()
