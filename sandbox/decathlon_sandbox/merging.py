"""Lets the kernel merge equal memory pages of this sandbox's processes with those of other sandboxes (KSM).

The pages of two processes of one program are equal only if their addresses are: most pages of an interpreter
have pointers in them. So the address space of what the driver starts is not randomized, and `VARIABLES` fix
the order of Python's sets and dictionaries of strings. The driver's own addresses are random; it is small.

The kernel merges only while its thread for that runs (/sys/kernel/mm/ksm/run on the host).
"""

from __future__ import annotations

VARIABLES = {"PYTHONHASHSEED": "0"}
"""For the environment of the task's servers, unless their settings say otherwise."""
# linux/prctl.h, since Linux 6.4
_PR_SET_MEMORY_MERGE = 67
# linux/personality.h
_ADDR_NO_RANDOMIZE = 0x40000


def enable_merging() -> tuple[bool, bool]:
    """Set both for this process and what it starts from now on; returns whether each was set.

    Merging holds for this process at once, and fixed addresses for every program that is executed.
    """
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        prctl, personality = libc.prctl, libc.personality
    except (ImportError, OSError, AttributeError):
        return False, False
    merging = prctl(_PR_SET_MEMORY_MERGE, 1, 0, 0, 0) == 0
    # Replaces the personality as a whole: Docker's seccomp profile compares with single values, and every
    # ordinary process has 0 before.
    fixed_addresses = personality(_ADDR_NO_RANDOMIZE) != -1
    return merging, fixed_addresses
