"""Wake-ups for long polls: who waits is told that something changed, and looks again."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from contextlib import suppress


class Signals:
    """Named signals. A waiter takes `listen` before it looks, so that no change slips between."""

    def __init__(self) -> None:
        self._events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._waiting: Counter[str] = Counter()

    @property
    def anyone_waits(self) -> bool:
        return self._waiting.total() > 0

    def set(self, name: str) -> None:
        self._events.pop(name, asyncio.Event()).set()

    def listen(self, name: str) -> asyncio.Event:
        """The event that the next `set` of this name will set."""
        return self._events[name]

    async def wait(self, name: str, event: asyncio.Event, seconds: float) -> bool:
        """Waits for an event that `listen` gave; says whether it came within `seconds`."""
        self._waiting[name] += 1
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._waiting[name] -= 1


async def pause(seconds: float, stop: asyncio.Event) -> None:
    """Sleeps, unless `stop` is set or becomes so.

    Loops that call Redis end by such an event: redis-py takes a cancellation that comes in the
    middle of a call for a timeout, now and then.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
