"""Agent programs as players: `serve-episode`, `episode verdict`."""
