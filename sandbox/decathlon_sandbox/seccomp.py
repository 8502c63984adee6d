"""What nobody below a first process may ask of the kernel: to change that process's limits, or its turn.

Whoever has the same user may do both to any process (prlimit(2), setpriority(2), sched_setscheduler(2),
ioprio_set(2)), and with a limit of no CPU time the kernel kills even a first process. So those calls are
refused where they are about process 1, or about all of a user's. Kept by seccomp (its classic BPF program:
Linux, Documentation/userspace-api/seccomp_filter.rst), which is inherited and cannot be taken off.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050001  # with EPERM

_LOAD, _AND, _EQUALS, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER, _MACHINE, _FIRST, _SECOND = 0, 4, 16, 24
"""Where struct seccomp_data has the call's number, the machine, the lower halves of two arguments."""
_X32 = 0x40000000
"""In the numbers of x86-64's calls with short pointers."""
_ALL_OF_A_USERS = {"setpriority": 2, "ioprio_set": 3}

_BY_PROCESS = ("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
_NUMBERS = {
    0xC000003E: (302, 142, 144, 203, 314, 141, 251),  # x86-64
    0x40000003: (340, 154, 156, 241, 351, 97, 289),  # i386, which an x86-64 kernel serves as well
    0xC00000B7: (261, 118, 119, 122, 274, 140, 30),  # aarch64
}
"""Of the calls in `_BY_PROCESS`, then of those in `_ALL_OF_A_USERS`."""

Instruction = tuple[int, int, int, int]


def keep_the_first_process(libc: Any) -> bool:
    """Refuse those calls to this process and to all it starts; will they be?

    Not without the right to (no_new_privs), nor on machines whose numbers are not known here.
    """
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _program())
    header = struct.pack("@HP", len(program) // 8, _address(program))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0


def _address(data: bytes) -> int:
    import ctypes

    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _program() -> list[Instruction]:
    program: list[Instruction] = []
    for machine, numbers in _NUMBERS.items():
        calls = [
            check for number in numbers[: len(_BY_PROCESS)] for check in _if_call(number, _about(_FIRST))
        ]
        for number, everybody in zip(numbers[len(_BY_PROCESS) :], _ALL_OF_A_USERS.values(), strict=True):
            calls += _if_call(number, [*_about(_FIRST, everybody), *_about(_SECOND)])
        body = [(_LOAD, 0, 0, _NUMBER), (_AND, 0, 0, ~_X32 & 0xFFFFFFFF), *calls, (_RETURN, 0, 0, _ALLOW)]
        program += [(_LOAD, 0, 0, _MACHINE), (_EQUALS, 0, len(body), machine), *body]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _if_call(number: int, then: list[Instruction]) -> list[Instruction]:
    """Do `then` and allow, where the call has that number."""
    then = [*then, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUALS, 0, len(then), number), *then]


def _about(argument: int, value: int = 1) -> list[Instruction]:
    """Refuse where an argument is that: 1 is the first process, and its group."""
    return [(_LOAD, 0, 0, argument), (_EQUALS, 0, 1, value), (_RETURN, 0, 0, _REFUSE)]
