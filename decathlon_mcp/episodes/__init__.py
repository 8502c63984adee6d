"""Episodes: their life cycle, tools, access and admission, and the registry of all of them."""
