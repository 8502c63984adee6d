"""Reads the tree of branches that an episode is in: its origins, and what branches from each of them.

A search may branch without end, so a tree has at most MAX_EPISODES, MAX_BRANCHES of one episode, and
MAX_LEVELS below its root. The episode, its nearest MAX_ORIGINS origins, and then its branches come first.
"""

from __future__ import annotations

import math
import sqlite3
from collections import deque

from decathlon_mcp.plugins.history import queries
from decathlon_mcp.plugins.history.values import EpisodeSummary, EpisodeTree, TreeNode

MAX_EPISODES = 256
MAX_BRANCHES = 64
MAX_ORIGINS = 16
MAX_LEVELS = 32
"""Templates draw a tree by recursion."""


def read_tree(connection: sqlite3.Connection, public_id: str, owner: str | None) -> EpisodeTree | None:
    """The tree that an episode is in; None if it is no branch and has none. `owner`: only that token's."""
    episode = queries.summary(connection, public_id, owner)
    if episode is None:
        return None
    if episode.origin is None and not queries.branches(connection, public_id, owner, 1):
        return None
    path = _path(connection, episode, owner)
    nodes = {node.public_id: node for node in path}
    # From the episode to the root, then level by level.
    waiting = deque((node, len(path) - 1 - above) for above, node in enumerate(reversed(path)))
    while waiting:
        node, level = waiting.popleft()
        room = MAX_EPISODES - len(nodes)
        if level == MAX_LEVELS or not room:
            continue
        # One of them may be there: the next of the path.
        for branch in queries.branches(connection, node.public_id, owner, min(MAX_BRANCHES, room + 1)):
            if branch.public_id not in nodes and len(nodes) < MAX_EPISODES:
                nodes[branch.public_id] = added = TreeNode(branch.public_id, branch)
                node.branches.append(added)
                waiting.append((added, level + 1))
    for public_id, count in queries.branch_counts(connection, list(nodes), owner).items():
        nodes[public_id].hidden = count - len(nodes[public_id].branches)
    for node in nodes.values():
        node.branches.sort(key=_rank)
    root = path[0]
    is_cut = any(node.hidden for node in nodes.values()) or bool(root.episode and root.episode.origin)
    episodes = tuple(node.episode for node in nodes.values() if node.episode is not None)
    return EpisodeTree(root, episodes, is_cut)


def _path(connection: sqlite3.Connection, episode: EpisodeSummary, owner: str | None) -> list[TreeNode]:
    """The episode and its origins, each of them a branch of the one before it."""
    path = [TreeNode(episode.public_id, episode)]
    while episode.origin is not None and len(path) <= MAX_ORIGINS:
        above = queries.summary(connection, episode.origin.episode, owner)
        path.insert(0, TreeNode(episode.origin.episode, above, [path[0]]))
        if above is None:
            break
        episode = above
    return path


def _rank(node: TreeNode) -> tuple[bool, float]:
    reward = None if node.episode is None else node.episode.reward
    return not node.branches, math.inf if reward is None else -reward
