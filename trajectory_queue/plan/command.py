"""What `leeway plan` does with its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console

from leeway.errors import ConfigError
from trajectory_queue.plan import profile as profiles
from trajectory_queue.plan import report
from trajectory_queue.plan.profile import Profile
from trajectory_queue.plan.recorded import from_run


def plan(
    name: str | None, run: Path | None, overrides: Sequence[str], steps: int, out: Path | None
) -> None:
    """Asks everything about a profile, or about a recorded run; shows and writes the answers.

    Raises:
        ConfigError: neither or both are given, or a value cannot be.
    """
    if run is not None:
        # Typer reads the first override as the name.
        overrides = [*([name] if name else []), *overrides]
        profile = from_run(run)
    elif name is not None:
        profile = profiles.load(name)
    else:
        raise ConfigError(
            f"give a profile (a file, or one of {', '.join(profiles.published())}), or --from RUN"
        )
    profile = changed(profile, overrides)
    console = Console()
    answers = report.ask(profile, steps=steps)
    report.show(answers, console)
    directory = out or (run / "plan" if run is not None else Path("plans") / profile.name)
    report.write(answers, directory)
    console.print(f"pictures: {directory / 'plan.png'}", highlight=False)


def changed(profile: Profile, overrides: Sequence[str]) -> Profile:
    values = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"override {override!r}: write key=value, e.g. rollouts.nodes=16")
        values[key] = yaml.safe_load(text)
    return profile.where(**values) if values else profile
