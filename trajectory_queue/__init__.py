"""The durable, acknowledged queue between the rollout cluster and the trainer."""
