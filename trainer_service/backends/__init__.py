"""Backends: models, gradients and optimizers; they know of no algorithm."""
