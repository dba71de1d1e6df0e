"""Algorithms: pure functions on arrays and tensors; they know of no backend."""
