"""The life of an episode: phases, the task that owns it, who may use it, how many there are."""

from decathlon_mcp.episodes.caller import Caller, Role
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.house import open_episodes, provider_for, read_catalogue
from decathlon_mcp.episodes.listing import list_tasks
from decathlon_mcp.episodes.looking import look
from decathlon_mcp.episodes.registry import Episodes
from decathlon_mcp.episodes.seat import Seat, may_judge
from decathlon_mcp.episodes.toolbox import Toolbox, claim_tool, evaluate_tool

__all__ = [
    "Caller",
    "Episode",
    "Episodes",
    "Role",
    "Seat",
    "Toolbox",
    "claim_tool",
    "evaluate_tool",
    "list_tasks",
    "look",
    "may_judge",
    "open_episodes",
    "provider_for",
    "read_catalogue",
]
