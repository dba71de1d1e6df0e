"""The ledger: which group is where, and what may happen to it next.

A pure state machine without I/O: time and ids are handed in. It is the specification of the queue;
`lua/` holds the same transitions for Redis, and the tests prove that both give equal answers.

What holds after every command:
- A group moves only along `TRANSITIONS`, and for each lane
  enqueued = waiting + running + queued + leased + committed + filtered + stale + dead.
- Training groups outstanding (running + queued + leased) are at most (eta + 1) * B, unless a resume
  or a smaller budget left more there; then nothing is admitted until they are consumed.
- Bytes are kept for exactly the groups that may still be trained: from their first trajectory
  until they end, and committed ones until a checkpoint covers them.
- Time never goes back: a clock that jumps back stands still here.
"""

from __future__ import annotations

from typing import TypeVar, cast

from trajectory_queue.commands import Command
from trajectory_queue.ledger import operator, rollout, trainer
from trajectory_queue.ledger.books import Books

R = TypeVar("R")

_HANDLERS = {**rollout.HANDLERS, **trainer.HANDLERS, **operator.HANDLERS}


class Ledger:
    """See the module's docstring. Not thread-safe; `apply` is atomic because it never waits."""

    def __init__(self) -> None:
        self._books = Books()

    def apply(self, command: Command[R], now: int) -> R:
        """Applies one command at time `now` (milliseconds). See `commands.Store.apply`."""
        self._books.clock = max(self._books.clock, now)
        return cast("R", _HANDLERS[type(command)](self._books, command))
