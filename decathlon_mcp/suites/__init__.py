"""A checkout in Toolathlon's layout: tasks, servers, prompts, tokens, `suite.yaml`, splits."""
