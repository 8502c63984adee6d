"""Telemetry: logs."""
