"""Servers on all nodes of a Ray cluster, behind one address. Ray Serve imports `cluster.ray:app`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="cluster", routes=("decathlon_mcp.plugins.cluster.held_episodes:create",))
