"""No process outlives the one that started it. Standard library only: small children import it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded here, not in the child: between fork and exec a lock of the loader may be held for good.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when its parent ends.

    The parent is the thread that started it, which should therefore outlive it. To be called in the
    child, also as `preexec_fn`. Elsewhere than on Linux a child has to notice by itself, by the end
    of its input.

    Args:
        parent: Its process id.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # It ended before this was arranged.
        os._exit(1)
