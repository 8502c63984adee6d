"""What people see in a browser: what plays now, runs, and every call of an episode. Knows no MCP."""
