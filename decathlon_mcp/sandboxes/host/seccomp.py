"""Seccomp filter of a sandbox: refuses the system calls that Docker's default profile refuses.

Docker's profile lists what is allowed (moby, profiles/seccomp/default.json, version 25 and later) and depends
on the capabilities, of which a sandbox has none. This filter lists what is refused, and answers ENOSYS to
every call that is newer than the last one it knows, so that a new kernel does not widen it. Unlike Docker's,
it refuses programs of other architectures, also 32-bit programs: a filter by numbers would need their tables.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from decathlon_sandbox.seccomp_filters import (
    ALLOW,
    AND,
    AT_LEAST,
    EQUALS,
    FIRST,
    LOAD,
    LOAD_ARCHITECTURE,
    LOAD_NUMBER,
    REFUSE,
    RETURN,
    SECOND,
    THIRD,
    Instruction,
    assemble,
    if_call,
    refuse_if,
)

_NO_SUCH_CALL: Instruction = (RETURN, 0, 0, 0x00050026)
"""Answers ENOSYS."""

LAST_KNOWN = 462
"""mseal(2) of Linux 6.10. From 424 on, numbers are the same on all architectures."""
_REFUSED_EVERYWHERE = (
    *(425, 426, 427),  # io_uring
    *(428, 429, 430, 431, 432, 433, 442),  # mounts: open_tree to fspick, mount_setattr
    *(438, 440, 443, 450),  # pidfd_getfd, process_madvise, quotactl_fd, set_mempolicy_home_node
    *(457, 458, 459, 460, 461),  # statmount, listmount, lsm_*
)
_CLONE3 = 435
_NAMESPACE_FLAGS = 0x7E020000
"""Flags of clone(2) that create a namespace."""
_VSOCK = 40
_DEVICE_MODE = 0o20000
"""Bit of the file types of both kinds of devices, and of no other that mknod(2) takes."""
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""What Docker allows: Linux with or without short times and uname 2.6, and asking for the current value."""
FIXED_ADDRESSES = 0x40000
"""Personality ADDR_NO_RANDOMIZE, for sandboxes whose processes share equal pages."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """Numbers of an architecture's system calls. `refused`: below 424. `mknod`: with the mode's argument."""

    audit: int
    personality: int
    clone: int
    sockets: tuple[int, int]
    mknod: tuple[tuple[int, int], ...]
    refused: tuple[int, ...]


_ARCHITECTURES = {
    "x86_64": _Architecture(
        audit=0xC000003E,
        personality=135,
        clone=56,
        sockets=(41, 53),
        mknod=((133, SECOND), (259, THIRD)),
        refused=(
            *(103, 153, 161, 163, 169, 170, 171),  # syslog, vhangup, chroot, acct, reboot, set*name
            *(155, 165, 166, 272, 308),  # pivot_root, mount, umount2, unshare, setns
            *(164, 227),  # settimeofday, clock_settime
            *(167, 168, 179, 180),  # swapon, swapoff, quotactl, nfsservctl
            *(172, 173),  # iopl, ioperm
            *(174, 175, 176, 177, 178, 313),  # modules of the kernel
            *(134, 136, 139, 156, 212, 236),  # uselib, ustat, sysfs, _sysctl, lookup_dcookie, vserver
            *(237, 238, 239, 256, 279),  # memory policies and move_pages
            *(246, 320),  # kexec
            *(248, 249, 250),  # keys
            *(298, 300, 304, 312, 321, 323),  # perf_event_open, fanotify_init, open_by_handle_at, kcmp, bpf,
            # userfaultfd
        ),
    ),
    "aarch64": _Architecture(
        audit=0xC00000B7,
        personality=92,
        clone=220,
        sockets=(198, 199),
        mknod=((33, THIRD),),
        refused=(
            *(116, 58, 51, 89, 142, 161, 162),
            *(41, 40, 39, 97, 268),
            *(170, 112),
            *(224, 225, 60, 42),
            *(105, 106, 273),
            18,
            *(235, 236, 237, 238, 239),
            *(104, 294),
            *(217, 218, 219),
            *(241, 262, 265, 272, 280, 282),
        ),
    ),
}


def is_supported() -> bool:
    """Whether there is a filter for this machine's architecture."""
    return platform.machine() in _ARCHITECTURES


# It takes 0.4 ms, for every sandbox.
@cache
def compile_filter(*, fixed_addresses: bool = False, devices: bool = True) -> bytes:
    """The filter for this machine, as `bwrap --seccomp` reads it.

    `devices`: whether device files may be created, as far as the capabilities allow it, which gVisor does not
    ask for. `fixed_addresses`: also allow the personality `FIXED_ADDRESSES`. Raises KeyError unless
    `is_supported`.
    """
    names = _ARCHITECTURES[platform.machine()]
    personalities = (*_PERSONALITIES, *[FIXED_ADDRESSES, FIXED_ADDRESSES | 0x8] * fixed_addresses)
    program: list[Instruction] = [
        LOAD_ARCHITECTURE,
        (EQUALS, 1, 0, names.audit),
        _NO_SUCH_CALL,
        LOAD_NUMBER,
        # Also the calls of x86-64's x32, whose numbers have bit 30.
        (AT_LEAST, 0, 1, LAST_KNOWN + 1),
        _NO_SUCH_CALL,
        # With ENOSYS, programs use clone, whose flags are in a register and not in memory.
        *if_call(_CLONE3, [_NO_SUCH_CALL]),
        *if_call(names.clone, [*_refuse_flags(_NAMESPACE_FLAGS), ALLOW]),
        *if_call(names.personality, _refuse_unless(personalities)),
    ]
    for number, mode in () if devices else names.mknod:
        program += if_call(number, [*_refuse_flags(_DEVICE_MODE, mode), ALLOW])
    for number in names.sockets:
        program += if_call(number, [*refuse_if(FIRST, _VSOCK), ALLOW])
    for number in sorted({*names.refused, *_REFUSED_EVERYWHERE}):
        program += if_call(number, [REFUSE])
    return assemble([*program, ALLOW])


def _refuse_flags(flags: int, argument: int = FIRST) -> list[Instruction]:
    """Refuse the call if an argument has one of the flags."""
    return [(LOAD, 0, 0, argument), (AND, 0, 0, flags), (EQUALS, 1, 0, 0), REFUSE]


def _refuse_unless(values: Iterable[int]) -> list[Instruction]:
    """Refuse the call unless its first argument has one of the values."""
    allowed = [instruction for value in values for instruction in ((EQUALS, 0, 1, value), ALLOW)]
    return [(LOAD, 0, 0, FIRST), *allowed, REFUSE]
