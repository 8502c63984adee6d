"""Adapters for training and evaluation libraries, one module each; only that module imports its library.

Each library is an extra (`decathlon-mcp[verifiers]`, ...), because they cannot all share one environment.
`docs/trainers.md` has a section for each.
"""
