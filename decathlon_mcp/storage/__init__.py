"""The state folder: trajectories, keys, instance lock."""
