"""Draws of a profile: what one group's samples are made of, a function of its place in the data.

The same group asks for the same work under every budget and split, so that simulations differ by
what is asked of them and not by luck.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trajectory_queue.plan.profile import Profile


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of one sample: seconds away (reading a prompt, in a tool), then decoding.

    `decode_seconds`: As long as it takes on a node where nothing else decodes.
    """

    away_seconds: float
    decode_seconds: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Work:
    """One sample."""

    parts: tuple[Part, ...]
    fails: bool
    """At the group's first attempt, when it is done."""

    @property
    def tokens(self) -> float:
        return sum(part.tokens for part in self.parts)


class Workload:
    """The groups of a profile, by their sequence."""

    def __init__(self, profile: Profile, seed: int = 0) -> None:
        self._profile = profile
        self._seed = seed

    def group(self, sequence: int) -> tuple[list[Work], bool]:
        """The samples of one queued group, and whether it has a signal to learn from."""
        profile, rollouts = self._profile, self._profile.rollouts
        prompt = sequence // (profile.group_size // profile.queued_group_size)
        random = np.random.default_rng([self._seed, prompt])
        signal = bool(random.random() >= rollouts.no_signal_share)
        fails = random.random(profile.group_size) < rollouts.failure_share
        if rollouts.answers:
            recorded = self._recorded(prompt)
            chosen = random.permutation(len(recorded))
            whole: list[tuple[Part, ...]] = [
                (Part(0.0, recorded[index][1], recorded[index][0]),)
                for index in np.resize(chosen, profile.group_size)
            ]
        else:
            whole = self._drawn(random, prompt)
        samples = [Work(parts, bool(bad)) for parts, bad in zip(whole, fails, strict=True)]
        if profile.streaming:
            place = sequence % profile.group_size
            samples = samples[place : place + 1]
        return samples, signal

    def _recorded(self, prompt: int) -> tuple[tuple[float, float], ...]:
        """A recorded group. The groups of a batch are drawn together: what made all of them slow
        (a busy machine) would otherwise be spread over batches, each of which waits for its
        slowest. A block bootstrap; Künsch (1989), Ann. Stat. 17(3).
        """
        answers, length = self._profile.rollouts.answers, self._profile.batch_groups
        block, place = divmod(prompt, length)
        random = np.random.default_rng([self._seed, block, 1])
        start = length * int(random.integers(-(-len(answers) // length)))
        return answers[(start + place) % len(answers)]

    def _drawn(self, random: np.random.Generator, prompt: int) -> list[tuple[Part, ...]]:
        profile, rollouts = self._profile, self._profile.rollouts
        common, own = random.standard_normal(), random.standard_normal(profile.group_size)
        lengths = rollouts.answer_tokens.at(
            np.sqrt(rollouts.alike) * common + np.sqrt(1.0 - rollouts.alike) * own
        )
        lengths = lengths * (1.0 + rollouts.growth) ** (prompt / profile.batch_groups)
        tools = rollouts.tool_seconds.at(
            random.standard_normal((profile.group_size, rollouts.tool_calls))
        )
        turns = rollouts.tool_calls + 1
        samples = []
        for length, waits in zip(np.maximum(lengths, 1.0) / turns, tools, strict=True):
            tokens = float(length)
            seconds = tokens * rollouts.token_seconds
            away = (rollouts.prompt_seconds, *(float(wait) for wait in waits))
            samples.append(tuple(Part(wait, seconds, tokens) for wait in away))
        return samples
