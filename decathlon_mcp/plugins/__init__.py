"""Plug-ins: what an episode can do without, each in a module or folder of its own. Only `hooks` imports them."""
