"""Program for tests: claims an environment of so many MiB over memory that it never touches, and waits.

Prints "claimed", or why the kernel refuses. PR_SET_MM_MAP needs no capability.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_MM, PR_SET_MM_MAP = 1, 35, 14
PROT_READ, MAP_NORESERVE = 1, 0x4000


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # It must not outlive the test, which may be killed.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
    size = int(sys.argv[1]) << 20
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    start = libc.mmap(None, ctypes.c_size_t(size), PROT_READ, flags, -1, ctypes.c_long(0))
    # From field 3 on, see proc(5).
    stat = [0, 0, 0, *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]
    code, stack, data, heap, arguments = stat[26:28], stat[28], stat[45:47], stat[47], stat[48:50]
    numbers = map(int, (*code, *data, heap, libc.sbrk(0), stack, *arguments, start, start + size, 0))
    call = struct.pack("@12QII", *numbers, 0, 0xFFFFFFFF)
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, call, ctypes.c_ulong(len(call)), ctypes.c_ulong(0)) == 0:
        sys.stdout.write("claimed\n")
        sys.stdout.flush()
        signal.pause()
    sys.stdout.write(f"{os.strerror(ctypes.get_errno())}\n")


if __name__ == "__main__":
    main()
