"""Telemetry: logs, metrics, and what spans are made with."""
