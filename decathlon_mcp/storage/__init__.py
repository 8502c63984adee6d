"""The state folder: store, trajectories, keys, locks."""
