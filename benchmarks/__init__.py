"""Benchmarks: each is a script whose last line of output is one JSON object."""
