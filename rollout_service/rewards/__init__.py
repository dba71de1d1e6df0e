"""Rewards: plain functions, called in processes that can be killed; see `sandbox.pool`."""

from rollout_service.rewards.scoring import Scorer

__all__ = ["Scorer"]
