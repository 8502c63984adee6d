"""Cost of calls, openings, gradings and memory, next to their lower bounds: `python -m benchmarks`.

Each number is measured in the same run as its lower bound, in turns with it, so that noise of the machine
affects both. The ratios are the results; no time is asserted. Needs Docker, the tests' image
(`tests/image/build`) and some minutes on an otherwise idle machine.

`figures` has the values, `sections` the parts and their order, and each part has a module.
`docs/performance.py` makes a page of the results in `results`. `attacks`, `many` and `survival` are programs
of their own.
"""
