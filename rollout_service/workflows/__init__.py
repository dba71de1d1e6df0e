"""Workflows: how leased samples become scored trajectories; one of them a run, see `base`."""
