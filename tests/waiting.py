"""Waiting for a condition, with a deadline and a name; and processes, which end when they like."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import psutil


def until(
    condition: Callable[[], object],
    what: str,
    seconds: float = 30.0,
    said: Callable[[], str] = str,
    every: float = 0.02,
) -> None:
    """Waits until the condition is true.

    Args:
        said: What the processes waited for have to say, if it does not come.
        every: Seconds between two looks.

    Raises:
        AssertionError: Not within so many seconds.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s\n{said()}"
        time.sleep(every)


async def eventually(
    condition: Callable[[], object | Awaitable[object]],
    what: str,
    seconds: float = 20.0,
    every: float = 0.005,
) -> None:
    """The same in an event loop, which goes on meanwhile; a condition may be a coroutine."""
    end = time.monotonic() + seconds
    while True:
        met = condition()
        if inspect.isawaitable(met):
            met = await met
        if met:
            return
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(every)


def children(
    pid: int, where: Callable[[list[str]], bool] = lambda command: True
) -> list[psutil.Process]:
    """What a process has started, and what that has, of which the command line is such.

    Raises:
        psutil.NoSuchProcess: The process itself has ended: it is not one without children.
    """
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if where(one.cmdline()):
                found.append(one)
    return found


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and of which nobody took notice yet does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(processes: Iterable[psutil.Process]) -> bool:
    """Whether all have ended (and not: whether their ids are free; those may be others' by now)."""
    return not any(one.is_running() and alive(one.pid) for one in processes)


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kills those that have not ended meanwhile."""
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()
