"""Metrics for Prometheus: `/metrics`."""
