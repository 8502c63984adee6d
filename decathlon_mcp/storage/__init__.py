"""The state folder: journal, keys, instance lock."""
