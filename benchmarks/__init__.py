"""What a call, an opening and a batch cost, next to what they cannot cost less than: `python -m benchmarks`.

Every number is measured in the same run as the floor it is held against, in turns, so that a machine's noise
meets both; what counts are the ratios, and no time is ever asserted. It needs Docker, the tests' image
(`tests/image/build`) and some minutes on a machine that does nothing else.
"""
