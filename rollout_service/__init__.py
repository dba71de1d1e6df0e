"""The rollout cluster: nodes that lease tasks, generate, score and push. They only dial out."""
