"""Episodes that begin where others stood: saved states, branches, and tasks that are set up once."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(
    name="branches",
    settings="decathlon_mcp.plugins.branches.settings:BranchSettings",
    episodes=("decathlon_mcp.plugins.branches.branches:create",),
    lobby_tools=(
        "decathlon_mcp.plugins.branches.lobby_tools:StartOrBranchEpisode",
        "decathlon_mcp.plugins.branches.lobby_tools:SnapshotEpisode",
    ),
    saved_states=("decathlon_mcp.plugins.branches.states:remove_states_of_ended",),
)
