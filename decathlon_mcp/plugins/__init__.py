"""Plug-ins: what an episode can do without, each in a module or folder here. Only `hooks` imports them."""
