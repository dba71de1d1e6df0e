"""The profile of a run: all that decides its throughput and staleness, as distributions.

A profile is a YAML file, comes from a recorded run (`recorded.py`), or is a published one
(`profiles/`). Seconds are those of the run; a length is in tokens.
"""

from __future__ import annotations

from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from leeway.config import OverBudget, UpdateMode
from leeway.errors import ConfigError
from leeway.section import Section

Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class LogNormal(Section):
    """A log-normal distribution, cut off at `longest`."""

    median: PositiveFloat
    sigma: NonNegativeFloat = 0.0
    """Standard deviation of the logarithm; ln(r) / 2.33 if the 99th percentile is r medians."""
    longest: PositiveFloat | None = None

    def at(self, normal: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Values at standard normal draws, of any shape."""
        values = self.median * np.exp(self.sigma * normal)
        return np.minimum(values, self.longest if self.longest is not None else np.inf)

    @cached_property
    def mean(self) -> float:
        # Quantiles at the middle of equal shares: exact enough for sums over a batch, no scipy.
        normal = np.random.default_rng(0).standard_normal(200_000)
        return float(self.at(normal).mean())


class Rollouts(Section):
    """The rollout cluster and what it is asked for."""

    nodes: PositiveInt = 1
    gpus_per_node: NonNegativeFloat = 1.0
    concurrency: PositiveInt = 64
    """Sequences that a node has at once."""
    answer_tokens: LogNormal = LogNormal(median=256.0)
    """Tokens that the model generates for one sample, all turns together."""
    answers: tuple[tuple[tuple[float, float], ...], ...] = ()
    """Recorded groups in the order of their batches, each the (tokens, seconds) of its answers;
    they stand for `answer_tokens`, `prompt_seconds`, `tool_seconds` and `token_seconds`."""
    growth: float = 0.0
    """By this part a batch's answers are longer than those of the batch before, in the mean."""
    alike: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """How much of the logarithm's variance the answers to one prompt have in common."""
    prompt_seconds: NonNegativeFloat = 0.0
    """To read a prompt, before the first token."""
    token_seconds: PositiveFloat = 0.02
    """To generate one token while nothing else runs on the node."""
    slowdown: NonNegativeFloat = 0.0
    """By this part of `token_seconds` each further sequence that decodes on the node slows all."""
    tool_calls: NonNegativeInt = 0
    """Of one sample; it generates between them in equal parts."""
    tool_seconds: LogNormal = LogNormal(median=1.0)
    read_seconds: NonNegativeFloat = 0.0
    """To read again one generated token, under new weights (update_mode = recompute)."""
    update_mode: UpdateMode = UpdateMode.IN_PLACE
    update_seconds: NonNegativeFloat = 0.0
    """From a new version's announcement until a node has it."""
    pause_seconds: NonNegativeFloat = 0.0
    """How long a node stands still for the swap."""
    no_signal_share: Share = 0.0
    """Of groups: their scores are all equal, and the queue ends them."""
    failure_share: Share = 0.0
    """Of samples, at their group's first attempt."""
    hours_between_failures: PositiveFloat | None = None
    """Of one node, in the mean; by default nodes do not fail."""
    restart_seconds: NonNegativeFloat = 300.0
    """Until a node that failed is back."""


class Trainer(Section):
    """The trainer cluster."""

    gpus: NonNegativeFloat = 1.0
    fixed_seconds: NonNegativeFloat = 0.0
    """Of a step, whatever the batch and the cluster."""
    token_seconds: NonNegativeFloat = 0.0
    """Seconds of one GPU for one trained token."""
    publish_seconds: NonNegativeFloat = 0.0
    """That the trainer spends on handing a version over."""
    call_seconds: NonNegativeFloat = 0.0
    """Of a step, for the queue's answers."""

    def step_seconds(self, tokens: float) -> float:
        return self.fixed_seconds + tokens * self.token_seconds / max(self.gpus, 1e-9)


class Profile(Section):
    """See the module's docstring."""

    name: str = "profile"
    source: str = ""
    """Where the figures are from."""
    group_size: PositiveInt = 8
    batch_groups: PositiveInt = 8
    budget: NonNegativeInt = 2
    over_budget: OverBudget = OverBudget.MASK
    max_reissues: NonNegativeInt = 2
    patience_seconds: NonNegativeFloat = 60.0
    streaming: bool = False
    """Trajectories are queued as they complete (queue.group_release)."""
    lease_seconds: PositiveFloat = 60.0
    rollouts: Rollouts = Rollouts()
    trainer: Trainer = Trainer()
    gpu_hour_price: NonNegativeFloat = 2.0
    """In any currency."""

    @property
    def queued_group_size(self) -> int:
        return 1 if self.streaming else self.group_size

    @property
    def queued_batch_groups(self) -> int:
        return self.batch_groups * (self.group_size // self.queued_group_size)

    @property
    def batch_samples(self) -> int:
        return self.batch_groups * self.group_size

    @property
    def gpus(self) -> float:
        return self.rollouts.nodes * self.rollouts.gpus_per_node + self.trainer.gpus

    def where(self, **values: object) -> Profile:
        """A profile with other values, e.g. `where(budget=4, **{"rollouts.nodes": 8})`."""
        tree = self.model_dump()
        for key, value in values.items():
            *sections, name = key.split(".")
            node = tree
            for section in sections:
                node = node[section]
            if name not in node:
                raise ConfigError(f"{key}: unknown; known: {', '.join(node)}")
            node[name] = value
        return _validated(tree, self.name)


def published() -> list[str]:
    """Names of the published profiles."""
    files = resources.files(__package__).joinpath("profiles").iterdir()
    return sorted(Path(file.name).stem for file in files if file.name.endswith(".yaml"))


def load(name: str) -> Profile:
    """A published profile by its name, or a file's.

    Raises:
        ConfigError: there is none, or it is none.
    """
    if name in published():
        text = resources.files(__package__).joinpath(f"profiles/{name}.yaml").read_text()
    else:
        try:
            text = Path(name).read_text()
        except OSError as error:
            raise ConfigError(
                f"profile {name}: {error.strerror}; give a file, or one of {', '.join(published())}"
            ) from error
    tree = yaml.safe_load(text)
    if not isinstance(tree, dict):
        raise ConfigError(f"profile {name}: expected keys such as `rollouts:`")
    return _validated({"name": Path(name).stem, **tree}, name)


def _validated(tree: object, name: str) -> Profile:
    try:
        return Profile.model_validate(tree)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, fault['loc']))} = {fault['input']!r}: {fault['msg']}"
            for fault in error.errors()
        ]
        raise ConfigError("\n".join([f"profile {name}:", *lines])) from error
