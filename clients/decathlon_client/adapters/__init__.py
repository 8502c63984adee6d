"""One file for each library that trains or measures; each imports that library, and nothing else here does.

A library is not installed by this package but by its extra (`decathlon-mcp[verifiers]`, ...): they cannot all
share one environment. `docs/trainers/` has a page for each.
"""
