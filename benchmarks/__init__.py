"""Latency and throughput of calls, set-up and batches, next to their lower bounds: `python -m benchmarks`.

Each number is measured in the same run as its lower bound, alternating with it, so that noise of the machine
affects both. The ratios are the results; no time is asserted. Needs Docker, the tests' image
(`tests/image/build`) and some minutes on an otherwise idle machine.
"""
