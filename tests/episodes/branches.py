"""The plug-in for branches and saved states of a running registry, for the tests of this folder."""

from __future__ import annotations

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.plugins.branches.branches import Branches


def branches_of(registry: EpisodeRegistry) -> Branches:
    """What saves the states of the registry's episodes."""
    assert isinstance(registry.branching, Branches)
    return registry.branching
