"""Seccomp filters: their instructions, and the filter that protects the sandbox's first process.

That filter protects it from the other processes of its user.

Any process can change the limits and the scheduling of another process of the same user (prlimit(2),
setpriority(2), sched_setscheduler(2), ioprio_set(2)); with a CPU limit of zero the kernel kills even a first
process. Limits belong to a whole process, and each of its threads has an id by which prlimit(2) finds it. So
the filter refuses to set limits by any id but 0, the caller itself; limits of all processes can be read.
Scheduling belongs to single threads: the filter refuses to change it for process 1 and for all processes of a
user. Other ids are allowed, because pthread_setaffinity_np(3) needs them; a slowed thread of the driver
delays its own sandbox only. Children inherit the filter and cannot remove it.

Signals to process 1 are accepted and not sent. Linux drops them anyway, SIGKILL too; gVisor delivers them.

Format: classic BPF, see Documentation/userspace-api/seccomp_filter.rst in Linux.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


Instruction = tuple[int, int, int, int]

LOAD, AND, EQUALS, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW: Instruction = (RETURN, 0, 0, 0x7FFF0000)
REFUSE: Instruction = (RETURN, 0, 0, 0x00050001)
"""With EPERM."""
IGNORE: Instruction = (RETURN, 0, 0, 0x00050000)
"""Without an error."""
LOAD_NUMBER: Instruction = (LOAD, 0, 0, 0)
LOAD_ARCHITECTURE: Instruction = (LOAD, 0, 0, 4)
FIRST, SECOND, THIRD = 16, 24, 32
"""Offsets in struct seccomp_data: the lower halves of three arguments. The kernel takes a number of 32 bits
from the lower half alone; a pointer is both halves."""

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_UPPER_HALF = 4
# Bit in the number of an x86-64 call of the x32 ABI.
_X32 = 0x40000000
# Value of the first argument that means "all processes of a user".
_BY_USER = {"setpriority": 2, "ioprio_set": 3}

_BY_THREAD = ("sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
_SIGNALS = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
# By architecture the numbers of prlimit64 and of the calls in `_BY_THREAD`, `_BY_USER` and `_SIGNALS`.
# Architectures that a kernel serves besides its own are included: a program may use their calls at any time.
_NUMBERS = {
    0xC000003E: (302, 142, 144, 203, 314, 141, 251, 62, 234, 129, 297),  # x86-64
    0x40000003: (340, 154, 156, 241, 351, 97, 289, 37, 270, 178, 335),  # i386, on x86-64 kernels
    0xC00000B7: (261, 118, 119, 122, 274, 140, 30, 129, 131, 138, 240),  # aarch64
    0x40000028: (369, 154, 156, 241, 380, 97, 314, 37, 268, 178, 363),  # arm, on aarch64 kernels
}


def assemble(program: Iterable[Instruction]) -> bytes:
    """The filter as the kernel reads it, an array of struct sock_filter."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def if_call(number: int, then: Sequence[Instruction]) -> list[Instruction]:
    """Run `then`, which ends with a return, if the call has that number, which is loaded."""
    return [(EQUALS, 0, len(then), number), *then]


def refuse_if(argument: int, value: int) -> list[Instruction]:
    """Refuse the call if an argument has that value."""
    return [(LOAD, 0, 0, argument), (EQUALS, 0, 1, value), REFUSE]


def protect_first_process(libc: Any) -> bool:
    """Install the filter in this process and its future children; return whether it was installed.

    Fails without CAP_SYS_ADMIN or no_new_privs. On other architectures the filter allows everything.
    """
    program = first_process_filter()
    header = struct.pack("@HP", len(program) // 8, _address(program))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0


def first_process_filter() -> bytes:
    """The filter, which all processes of a sandbox have."""
    return assemble(_program())


def _address(data: bytes) -> int:
    import ctypes

    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _program() -> list[Instruction]:
    # The first process has the id 1, and so has its group.
    refuse_first, refuse_second = refuse_if(FIRST, 1), refuse_if(SECOND, 1)
    program: list[Instruction] = []
    for architecture, (prlimit, *numbers) in _NUMBERS.items():
        calls = if_call(prlimit, [*_refuse_limit_of_others(), ALLOW])
        for number in numbers[: len(_BY_THREAD)]:
            calls += if_call(number, [*refuse_first, ALLOW])
        of_users, of_signals = numbers[len(_BY_THREAD) : -len(_SIGNALS)], numbers[-len(_SIGNALS) :]
        for number, by_user in zip(of_users, _BY_USER.values(), strict=True):
            calls += if_call(number, [*refuse_if(FIRST, by_user), *refuse_second, ALLOW])
        for number in of_signals:
            calls += if_call(number, [(LOAD, 0, 0, FIRST), (EQUALS, 0, 1, 1), IGNORE, ALLOW])
        body = [LOAD_NUMBER, (AND, 0, 0, ~_X32 & 0xFFFFFFFF), *calls, ALLOW]
        program += [LOAD_ARCHITECTURE, (EQUALS, 0, len(body), architecture), *body]
    return [*program, ALLOW]


def _refuse_limit_of_others() -> list[Instruction]:
    """Refuse prlimit64 if it sets a limit (its third argument, a pointer, is not NULL) by an id but 0."""
    return [
        (LOAD, 0, 0, FIRST),
        (EQUALS, 5, 0, 0),
        (LOAD, 0, 0, THIRD),
        (EQUALS, 0, 2, 0),
        (LOAD, 0, 0, THIRD + _UPPER_HALF),
        (EQUALS, 1, 0, 0),
        REFUSE,
    ]
