"""Readiness of this machine and of tasks on it: `doctor`, `tasks`, the checks of `serve`."""
