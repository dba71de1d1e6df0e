"""Rewards: plain functions, called in processes that can be killed; see `pool`."""

from rollout_service.rewards.pool import RewardPool

__all__ = ["RewardPool"]
