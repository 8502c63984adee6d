"""The full-screen player: a person at a terminal in the agent's place. Needs the extra `play`.

`attempt` owns the episode, whatever the screens do; `field`, `draft` and `fault` make forms of JSON schemas
and know no screen; the rest is Textual's.
"""

from decathlon_client.player.app import PlayerApp, play_by_hand

__all__ = ["PlayerApp", "play_by_hand"]
