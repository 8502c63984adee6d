"""Episodes: their life, the task that owns each one, access to them, admission."""
