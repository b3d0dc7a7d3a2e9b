"""A kernel that does not let a process read another one's memory, as in a container whose filter does so."""

from __future__ import annotations

import ctypes
import os


def forbid_reading() -> None:
    """From now on the kernel answers each ``process_vm_readv`` of this process with EPERM."""
    number = {"x86_64": 310, "aarch64": 270}[os.uname().machine]

    def word(code: int, jump_if: int, jump_else: int, k: int) -> int:
        return code | jump_if << 16 | jump_else << 24 | k << 32

    load, equal, give = 0x20, 0x15, 0x06
    rules = (ctypes.c_uint64 * 4)(
        word(load, 0, 0, 0), word(equal, 0, 1, number), word(give, 0, 0, 0x00050001), word(give, 0, 0, 0x7FFF0000)
    )
    program = (ctypes.c_uint64 * 2)(len(rules), ctypes.addressof(rules))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0, ctypes.get_errno()  # PR_SET_NO_NEW_PRIVS
    assert prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
