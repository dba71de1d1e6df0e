"""What every Leeway process does at its start and end.

A process stops on SIGTERM and SIGINT, and when its parent's end of standard input closes (if it was
started with `LEEWAY_LIFELINE=1`): so nothing outlives `leeway up`, however that ends. A rank that
torchrun started ends with its agent, which alone would start it again or stop it. Exit codes say
whether starting it again could help.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import signal
import sys
import threading
from collections.abc import Awaitable, Callable

import structlog

from leeway.errors import ConfigError, FencedError, LeewayError
from leeway.health import HEALTH
from leeway.orphans import end_with_parent
from leeway.traces import TRACES

log = structlog.get_logger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
"""Something broke; another start may succeed."""
EXIT_CONFIG = 2
"""The configuration is wrong; starting again cannot help."""
EXIT_FENCED = 3
"""A newer life of this process has taken over."""

LIFELINE = "LEEWAY_LIFELINE"
_RANK = "TORCHELASTIC_RUN_ID"
"""Set by torchrun's agent for the ranks that it starts."""
# An orphan that has not stopped by itself after so long is ended.
_ORPHAN_SECONDS = 5.0
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def run(
    main: Callable[[asyncio.Event], Awaitable[None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Runs `main(stop)` until it returns; `stop` is set when the process is asked to end.

    Args:
        loop_factory: Makes the event loop; by default asyncio's own.

    Returns:
        The exit code. Errors are logged: those that Leeway raises on purpose without a traceback.
    """

    if os.environ.get(_RANK):
        # At once: it may be in the middle of a collective, where it hears of no signal.
        end_with_parent(os.getppid())
    keep_freed_memory()

    async def supervised() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        if os.environ.get(LIFELINE):
            threading.Thread(target=_watch_lifeline, args=(loop, stop), daemon=True).start()
        beating = asyncio.create_task(HEALTH.beat())
        try:
            await main(stop)
        finally:
            beating.cancel()

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(supervised())
    except BaseExceptionGroup as group:
        return _report(_first(group))
    except Exception as error:
        return _report(error)
    finally:
        TRACES.close()
    return EXIT_OK


def keep_freed_memory() -> None:
    """Lets glibc keep freed blocks; elsewhere nothing changes.

    Otherwise every large block (a message, a tensor) goes back to the kernel when it is freed, and
    is cleared anew for the next: more than half of what a gRPC message of a megabyte costs, and a
    twentieth of a small model's training step.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(-1))


def _report(error: BaseException) -> int:
    if not isinstance(error, LeewayError):
        log.error("failed", exc_info=error)
        return EXIT_FAILED
    log.error(str(error), error=type(error).__name__)
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    return EXIT_FENCED if isinstance(error, FencedError) else EXIT_FAILED


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _watch_lifeline(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(stop.set)
    timer = threading.Timer(_ORPHAN_SECONDS, os._exit, args=(EXIT_FAILED,))
    timer.daemon = True
    timer.start()
