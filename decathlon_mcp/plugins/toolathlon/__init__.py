"""Toolathlon's own: its profiles and releases, local tools, repaired arguments, and its evaluators' log."""
