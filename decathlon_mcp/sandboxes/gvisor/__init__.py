"""Sandboxes with a kernel of their own in user space, gVisor's, without a daemon and without being root."""
