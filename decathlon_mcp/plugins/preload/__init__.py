"""Python servers that start as forks of processes which have imported their libraries (`--preload`)."""
