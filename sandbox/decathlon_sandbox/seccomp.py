"""Seccomp filter that protects the sandbox's first process from the other processes of its user.

Any process can change the limits and the scheduling of another process of the same user (prlimit(2),
setpriority(2), sched_setscheduler(2), ioprio_set(2)); with a CPU limit of zero the kernel kills even a first
process. The filter refuses these calls if they concern process 1 or all processes of a user. Children inherit
it and cannot remove it. Format: classic BPF, see Documentation/userspace-api/seccomp_filter.rst in Linux.
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
# Offsets in struct seccomp_data: the call's number, the architecture, the lower halves of two arguments.
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
# Bit in the number of an x86-64 call of the x32 ABI.
_X32 = 0x40000000
# Value of the first argument that means "all processes of a user".
_BY_USER = {"setpriority": 2, "ioprio_set": 3}

_BY_PROCESS = ("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
# Per architecture the numbers of the calls in `_BY_PROCESS`, then of those in `_BY_USER`.
_NUMBERS = {
    0xC000003E: (302, 142, 144, 203, 314, 141, 251),  # x86-64
    0x40000003: (340, 154, 156, 241, 351, 97, 289),  # i386, which x86-64 kernels also serve
    0xC00000B7: (261, 118, 119, 122, 274, 140, 30),  # aarch64
}

Instruction = tuple[int, int, int, int]


def protect_first_process(libc: Any) -> bool:
    """Install the filter in this process and its future children; return whether it was installed.

    Fails without CAP_SYS_ADMIN or no_new_privs. On other architectures the filter allows everything.
    """
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _program())
    header = struct.pack("@HP", len(program) // 8, _address(program))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0


def _address(data: bytes) -> int:
    import ctypes

    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _program() -> list[Instruction]:
    program: list[Instruction] = []
    for architecture, numbers in _NUMBERS.items():
        calls = [
            check for number in numbers[: len(_BY_PROCESS)] for check in _if_call(number, _refuse_if(_FIRST))
        ]
        for number, by_user in zip(numbers[len(_BY_PROCESS) :], _BY_USER.values(), strict=True):
            calls += _if_call(number, [*_refuse_if(_FIRST, by_user), *_refuse_if(_SECOND)])
        body = [(_LOAD, 0, 0, _NUMBER), (_AND, 0, 0, ~_X32 & 0xFFFFFFFF), *calls, (_RETURN, 0, 0, _ALLOW)]
        program += [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUALS, 0, len(body), architecture), *body]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _if_call(number: int, then: list[Instruction]) -> list[Instruction]:
    """Run `then` and allow the call, if it has that number."""
    then = [*then, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUALS, 0, len(then), number), *then]


def _refuse_if(argument: int, value: int = 1) -> list[Instruction]:
    """Refuse the call if an argument has that value; 1 is the first process, or its group."""
    return [(_LOAD, 0, 0, argument), (_EQUALS, 0, 1, value), (_RETURN, 0, 0, _REFUSE)]
