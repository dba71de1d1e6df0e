"""Inference engines behind one Protocol; see `base`."""
