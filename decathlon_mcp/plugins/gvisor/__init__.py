"""Sandboxes with a kernel of their own, gVisor's."""
