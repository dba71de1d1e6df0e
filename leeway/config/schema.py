"""The whole configuration: its sections, and what must agree between them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr, model_validator

from leeway.config.queue import QueueConfig, StalenessConfig
from leeway.config.rollout import RolloutConfig
from leeway.config.run import ModelConfig, RunConfig
from leeway.config.services import SecurityConfig, TelemetryConfig, WeightsConfig
from leeway.config.task import SamplingConfig, TaskConfig
from leeway.config.trainer import TrainerConfig
from leeway.section import Section


class Config(Section):
    """The whole configuration of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    task: TaskConfig
    sampling: SamplingConfig = SamplingConfig()
    staleness: StalenessConfig = StalenessConfig()
    queue: QueueConfig = QueueConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    security: SecurityConfig = SecurityConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.trainer.algorithm.advantage.relative_to_group and self.queued_group_size < 2:
            if self.queue.group_release == "streaming":
                raise ValueError(
                    "queue.group_release = streaming: trainer.algorithm.advantage.baseline = "
                    f"{self.trainer.algorithm.advantage.baseline} compares the answers to a "
                    "prompt, which must come together; use baseline=none with normalise=batch, or "
                    "group_release=complete"
                )
            raise ValueError(
                "sampling.group_size = 1: advantages are relative to the group, so that the reward "
                "would vanish; sample each prompt at least twice"
            )
        learns_from_rewards = self.trainer.algorithm.advantage.reward_coefficient > 0.0
        if self.queue.filter_equal_scores and not learns_from_rewards:
            raise ValueError(
                "queue.filter_equal_scores = true drops groups by their scores, from which "
                "trainer.algorithm.advantage.reward_coefficient = 0 does not learn; use "
                "queue.filter_equal_scores=false"
            )
        if self.trainer.lora_publish == "adapters" and not (
            self.trainer.lora_rank and self.rollout.engine.kind == "torch"
        ):
            raise ValueError(
                "trainer.lora_publish = adapters with trainer.lora_rank = "
                f"{self.trainer.lora_rank} and rollout.engine.kind = {self.rollout.engine.kind}: "
                "it takes adapters and an engine that adds them; use lora_publish=merged"
            )
        if self.rollout.sandbox.address is not None and self.task.agent is not None:
            raise ValueError(
                f"rollout.sandbox.address = {self.rollout.sandbox.address}: sandboxes run "
                "task.reward and task.environment; task.agent runs on the node, or elsewhere by "
                "itself (external)"
            )
        if self.rollout.concurrency == "auto" and self.rollout.auto.lowest < self.queued_group_size:
            raise ValueError(
                f"rollout.auto.lowest = {self.rollout.auto.lowest} holds no group of "
                f"sampling.group_size = {self.sampling.group_size}; use that or more"
            )
        if self.trainer.batch_groups % self.trainer.minibatches:
            raise ValueError(
                f"trainer.minibatches = {self.trainer.minibatches} does not divide "
                f"trainer.batch_groups = {self.trainer.batch_groups}"
            )
        if self.queue.min_group is not None and not (
            2 <= self.queue.min_group <= self.queued_group_size
        ):
            raise ValueError(
                f"queue.min_group = {self.queue.min_group}: use 2 to sampling.group_size = "
                f"{self.sampling.group_size}, and group_release=complete"
            )
        return self

    @property
    def queued_group_size(self) -> int:
        """Trajectories of a group in the queue: with streaming release each is one of its own."""
        return 1 if self.queue.group_release == "streaming" else self.sampling.group_size

    @property
    def queued_batch_groups(self) -> int:
        """Groups of the queue that make a batch; the same number of trajectories either way."""
        return self.trainer.batch_groups * (self.sampling.group_size // self.queued_group_size)

    def to_yaml(self, secret: str | None = "(secret)") -> str:
        """The resolved configuration.

        Args:
            secret: Stands in place of every secret that is set.
        """
        return yaml.safe_dump(_plain(self.model_dump(), secret), sort_keys=False)


def _plain(value: Any, secret: str | None) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item, secret) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, secret) for item in value]
    if isinstance(value, SecretStr):
        return secret
    if isinstance(value, StrEnum):
        return value.value
    return str(value) if isinstance(value, Path) else value
