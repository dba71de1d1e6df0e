"""The environment variables that the user's code starts with."""

from __future__ import annotations

import os

_SECRETS = ("REDIS_URL",)


def surroundings() -> dict[str, str]:
    """This process's, without those that configure Leeway: they may hold keys."""
    from leeway.config import ENV_PREFIX  # Heavy, and the user's process does not ask.

    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENV_PREFIX) and name not in _SECRETS
    }
