"""Plays tasks with policies that do not solve them, and says which tasks pay or leak: `audit`."""
