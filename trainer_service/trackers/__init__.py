"""Experiment trackers: where a run's metrics go besides metrics.jsonl (`telemetry.trackers`)."""
