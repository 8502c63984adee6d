"""What the bundle starts: `decathlon-mcp stdio --url`, out of the wheel beside it."""

from decathlon_mcp.cli import main

main()
