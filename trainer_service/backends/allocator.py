"""How the process's memory allocator treats large tensors.

glibc hands every block above 32 MiB back to the kernel when it is freed, and the kernel clears it
anew at the next step: about a twentieth of a small model's training step.
"""

from __future__ import annotations

import ctypes
import platform
import sys

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Lets glibc keep freed blocks for the next step. Elsewhere nothing changes."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, ctypes.c_int(-1))
