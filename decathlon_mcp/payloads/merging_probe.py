"""Whether memory merging and fixed addresses hold for a program that the driver has executed.

    python -I -c SOURCE

Prints {"merging": BOOL, "fixed_addresses": BOOL} as JSON. Standard library only, any Python from 3.8.
"""

from __future__ import annotations

import ctypes
import json
import sys

# linux/prctl.h and linux/personality.h
_PR_GET_MEMORY_MERGE = 68
_READ_PERSONALITY = 0xFFFFFFFF
_ADDR_NO_RANDOMIZE = 0x40000


def main() -> None:
    libc = ctypes.CDLL(None)
    # The argument is a long; as an int, which is the default, it would be extended to another value.
    personality = libc.personality(ctypes.c_ulong(_READ_PERSONALITY))
    result = {
        "merging": libc.prctl(_PR_GET_MEMORY_MERGE, 0, 0, 0, 0) == 1,
        "fixed_addresses": personality != -1 and bool(personality & _ADDR_NO_RANDOMIZE),
    }
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
