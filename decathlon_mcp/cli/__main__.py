"""`python -m decathlon_mcp.cli`, for when the script is not on the PATH."""

from decathlon_mcp.cli import main

main()
