"""The server's end of the line to one driver. The words on the line are `decathlon_sandbox.wire`'s."""

from decathlon_mcp.link.boot import BOOT_COMMAND
from decathlon_mcp.link.connections import Dial
from decathlon_mcp.link.conversation import Note
from decathlon_mcp.link.facts import RunResult, ServerFacts
from decathlon_mcp.link.link import Link, connect

__all__ = ["BOOT_COMMAND", "Dial", "Link", "Note", "RunResult", "ServerFacts", "connect"]
