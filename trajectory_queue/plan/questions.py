"""What people ask before a run: each question is one parameter varied, everything else kept.

The answers are simulations (`simulation.py`), on as many processes as the machine has cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from leeway.config import OverBudget, UpdateMode
from trajectory_queue.plan.outcome import Outcome
from trajectory_queue.plan.profile import Profile
from trajectory_queue.plan.simulation import simulate
from trajectory_queue.plan.workload import Workload

BUDGETS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
# "As good as the best": what more budget gives beyond is not worth its staleness.
TOLERANCE = 0.02
_WEEK_HOURS = 168.0
_SPLITS = 9
_SAMPLED_GROUPS = 500


@dataclass(frozen=True, slots=True)
class Answer:
    """One setting, and what it does."""

    setting: str
    profile: Profile
    outcome: Outcome

    @property
    def week_price(self) -> float:
        return self.profile.gpus * _WEEK_HOURS * self.profile.gpu_hour_price

    @property
    def price_of_1000_steps(self) -> float:
        hours = 1000.0 / self.outcome.steps_per_hour
        return self.profile.gpus * hours * self.profile.gpu_hour_price


@dataclass(frozen=True, slots=True)
class Bound:
    """Trained tokens a second that no admission rule can exceed."""

    trainer: float
    rollouts: float

    @property
    def tokens_per_second(self) -> float:
        return min(self.trainer, self.rollouts)


def bound(profile: Profile) -> Bound:
    """The trainer never waits for data or for the queue; or all slots of the fleet always decode
    as much as the samples' time in tools allows. Both from means of the workload."""
    workload = Workload(profile)
    works = [work for n in range(_SAMPLED_GROUPS) for work in workload.group(n)[0]]
    tokens = sum(work.tokens for work in works) / len(works)
    away = sum(part.away_seconds for work in works for part in work.parts) / len(works)
    decode = sum(part.decode_seconds for work in works for part in work.parts) / len(works)
    batch = tokens * profile.batch_samples
    trainer, rollouts = profile.trainer, profile.rollouts
    # Decoding slows with the sequences that decode, which are those not away: a fixed point.
    slower = 1.0
    for _ in range(100):
        share = decode * slower / (decode * slower + away) if decode + away else 1.0
        slower = 1.0 + rollouts.slowdown * max(0.0, rollouts.concurrency * share - 1.0)
    slots = rollouts.nodes * rollouts.concurrency
    return Bound(
        trainer=batch / (trainer.step_seconds(batch) + trainer.publish_seconds),
        rollouts=slots * tokens / (decode * slower + away) * (1.0 - rollouts.no_signal_share),
    )


def budgets(profile: Profile, etas: Iterable[int], *, steps: int, seed: int = 0) -> list[Answer]:
    """What each budget gives."""
    return _ask([(str(eta), profile.where(budget=eta)) for eta in etas], steps, seed)


def smallest_good(answers: Sequence[Answer]) -> Answer:
    """The smallest budget within `TOLERANCE` of the best throughput."""
    best = max(answer.outcome.tokens_per_second for answer in answers)
    return next(a for a in answers if a.outcome.tokens_per_second >= (1.0 - TOLERANCE) * best)


def splits(profile: Profile, *, steps: int, seed: int = 0) -> list[Answer]:
    """The same GPUs, divided between rollout nodes and trainer in other ways: over the whole range,
    and closer around the best of those."""
    most = int((profile.gpus - 1e-9) / max(profile.rollouts.gpus_per_node, 1e-9))
    coarse = _spread(1, most)
    answers = _divided(profile, coarse, steps, seed)
    at = coarse.index(best(answers).profile.rollouts.nodes)
    near = _spread(coarse[max(0, at - 1)], coarse[min(at + 1, len(coarse) - 1)])
    answers += _divided(profile, [n for n in near if n not in coarse], steps, seed)
    return sorted(answers, key=lambda answer: answer.profile.rollouts.nodes)


def _spread(least: int, most: int) -> list[int]:
    """At most `_SPLITS` whole numbers, evenly spaced, with both ends."""
    count = min(most - least + 1, _SPLITS)
    between = (most - least) / max(count - 1, 1)
    return [round(least + step * between) for step in range(count)]


def _divided(profile: Profile, choices: Sequence[int], steps: int, seed: int) -> list[Answer]:
    per_node = profile.rollouts.gpus_per_node
    settings = []
    for nodes in choices:
        rest = profile.gpus - nodes * per_node
        changed = profile.where(**{"rollouts.nodes": nodes, "trainer.gpus": rest})
        settings.append((f"{nodes * per_node:g} : {rest:g}", changed))
    return _ask(settings, steps, seed)


def best(answers: Sequence[Answer]) -> Answer:
    return max(answers, key=lambda answer: answer.outcome.tokens_per_second)


def policies(profile: Profile, *, steps: int, seed: int = 0) -> list[Answer]:
    """What the budget does to data that is over it, and how groups are released."""
    settings = [(policy.value, profile.where(over_budget=policy)) for policy in OverBudget]
    settings.append(("mask, streaming", profile.where(streaming=True, over_budget="mask")))
    return _ask(settings, steps, seed)


def update_modes(profile: Profile, *, steps: int, seed: int = 0) -> list[Answer]:
    """What happens to generations in flight when new weights arrive."""
    settings = [
        (mode.value, profile.where(**{"rollouts.update_mode": mode})) for mode in UpdateMode
    ]
    return _ask(settings, steps, seed)


def _ask(settings: Sequence[tuple[str, Profile]], steps: int, seed: int) -> list[Answer]:
    profiles = [profile for _, profile in settings]
    # Forked children would inherit whatever threads the caller has.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        outcomes = list(
            pool.map(_simulated, profiles, [steps] * len(settings), [seed] * len(settings))
        )
    return [
        Answer(name, profile, outcome)
        for (name, profile), outcome in zip(settings, outcomes, strict=True)
    ]


def _simulated(profile: Profile, steps: int, seed: int) -> Outcome:
    return simulate(profile, steps=steps, seed=seed)
