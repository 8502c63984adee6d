"""Episodes that begin where others stood: saved states, branches, and tasks that are set up once."""
