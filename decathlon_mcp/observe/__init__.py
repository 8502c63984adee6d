"""What is kept and said of what happens: logs, and each episode's journal on disk."""

from decathlon_mcp.observe.journal import Journal
from decathlon_mcp.observe.logs import configure_logging, fields

__all__ = ["Journal", "configure_logging", "fields"]
