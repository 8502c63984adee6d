"""Servers on all nodes of a Ray cluster, behind one address. Ray Serve imports `cluster.ray:app`."""
