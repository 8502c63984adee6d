"""Sandboxes as processes in namespaces of their own, which bubblewrap creates without a daemon."""
