"""Sandboxes that each have a kernel of their own, gVisor's."""
