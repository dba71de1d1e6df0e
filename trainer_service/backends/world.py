"""The ranks of one trainer, as torchrun starts them.

Rank 0 leads: it runs the loop, talks to the queue and holds the loss. The loss is computed where
the last pipeline stage is, so that rank is the first of that stage: the model's ranks are
torchrun's, rotated by all stages but one. Hosts keep their neighbours.

What must hold: only the leader decides; the others wait for its next command, at most `patience`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from leeway.errors import DeadlineError
from trainer_service.backends.layout import Layout

COLLECTIVE = timedelta(minutes=15)
"""Ranks in the same operation differ by a micro-batch at most."""
_POLL_SECONDS = 0.02
_worlds = itertools.count()
"""One after the other they share torchrun's store; all ranks count alike."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks.

    Attributes:
        rank: As torchrun counts; 0 leads.
        leader: The leader's rank in the process groups.
        control: All ranks, on CPUs: for the leader's commands.
        store: Small notes between ranks, from any thread.
    """

    rank: int
    size: int
    layout: Layout
    device: torch.device
    leader: int
    control: dist.ProcessGroup
    store: Store

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def note(self, key: str, value: str = "") -> None:
        self.store.set(key, value)

    def read(self, keys: Sequence[str], what: str, seconds: float) -> list[str]:
        """The values of all keys, once all are noted.

        Raises:
            DeadlineError: `what` did not happen within `seconds`.
        """
        end = time.monotonic() + seconds
        # Polled: a blocking wait would keep the other threads' notes out.
        while not self.store.check(list(keys)):
            if time.monotonic() > end:
                raise DeadlineError(f"{what}: not within {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)
        return [self.store.get(key).decode() for key in keys]

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """One rank of a host after the other, for what takes a whole model's memory."""
        for turn in range(ranks_of_a_host()):
            if turn == int(os.environ.get("LOCAL_RANK", "0")):
                yield
            dist.barrier(group=self.control)


def ranks() -> int:
    """How many torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_of_a_host() -> int:
    """How many torchrun started on this one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def join(layout: Layout, patience: float) -> Iterator[World]:
    """Meets the other ranks, and leaves them at the end.

    Args:
        patience: Seconds until the leader's next command: as long as it may wait for a batch, and
            then some.

    Raises:
        DeadlineError: they did not all come.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    store: Store = HashStore()
    rank, size = 0, 1
    if ranks() > 1:
        store, rank, size = next(rendezvous("env://", timeout=COLLECTIVE))
    leader = size - size // layout.pp
    number = next(_worlds)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"groups/{number}", store),
        rank=(rank + leader) % size,
        world_size=size,
        timeout=COLLECTIVE,
    )
    try:
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
        assert isinstance(control, dist.ProcessGroup)
        yield World(
            rank, size, layout, device, leader, control, PrefixStore(f"notes/{number}", store)
        )
    finally:
        dist.destroy_process_group()
