"""What simulated samples are made of: how many tokens, how long they take, whether they fail."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from leeway.config import Config
from leeway.trajectory import Int32Array, Sampling, Task
from trajectory_queue.plan.profile import Profile
from trajectory_queue.plan.workload import Part, Work, Workload

PROMPT_TOKENS = 8
_VOCABULARY = 32_000


class Pace(Protocol):
    """What samples are made of and how long it takes."""

    @property
    def slowdown(self) -> float:
        """Each further sequence on the node slows a sample by this part of its time."""
        ...

    def work(self, task: Task, index: int) -> Work: ...


@dataclass(frozen=True, slots=True)
class Speed:
    """Log-normal lengths at one speed, some tasks much slower than others."""

    median_tokens: int = 24
    sigma: float = 0.5
    tokens_per_second: float = 100.0
    slow_share: float = 0.03
    """Of tasks, by seed; their samples take `slow_factor` times as long."""
    slow_factor: float = 6.0
    slowdown: float = 0.0
    failure_share: float = 0.0
    """Of samples whose reward function fails at the first attempt."""

    def is_slow(self, task: Task) -> bool:
        return random.Random(task.seed).random() < self.slow_share

    def work(self, task: Task, index: int) -> Work:
        drawn = random.Random(task.seed * 1000 + index).lognormvariate(0.0, self.sigma)
        tokens = max(1, min(int(self.median_tokens * drawn), task.sampling.max_new_tokens))
        factor = self.slow_factor if self.is_slow(task) else 1.0
        fails = random.Random(task.seed * 7919 + index).random() < self.failure_share
        return Work((Part(0.0, tokens / self.tokens_per_second * factor, tokens),), fails)


class Planned:
    """The samples of a profile: the same that `leeway plan` simulates."""

    def __init__(self, profile: Profile, seed: int = 0) -> None:
        self.slowdown = profile.rollouts.slowdown
        self._workload = Workload(profile, seed)
        self._group = functools.lru_cache(maxsize=4096)(self._workload.group)

    def work(self, task: Task, index: int) -> Work:
        return self._group(task.sequence)[0][index]


def make_task(sequence: int, config: Config) -> Task:
    """A function of its position, like a real sampler's."""
    return Task(
        task_id=f"{config.run.name}-{sequence:08d}",
        sequence=sequence,
        messages=({"role": "user", "content": f"task {sequence}"},),
        columns={},
        group_size=config.queued_group_size,
        sampling=Sampling(
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            max_new_tokens=config.sampling.max_new_tokens,
        ),
        seed=config.run.seed * 1_000_003 + sequence,
    )


def tokens_of(task: Task, index: int, count: int) -> Int32Array:
    """The first `count` tokens, prompt included, of one sample: what any node makes of it."""
    generator = np.random.default_rng([task.seed, index])
    return generator.integers(0, _VOCABULARY, PROMPT_TOKENS + count).astype(np.int32)
