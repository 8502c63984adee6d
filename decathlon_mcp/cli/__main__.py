"""`python -m decathlon_mcp.cli`, for when the script is not on the PATH."""

from decathlon_mcp.cli import main

# The processes in which the page reads forms load this module again, under another name.
if __name__ == "__main__":
    main()
