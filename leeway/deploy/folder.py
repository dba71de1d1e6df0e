"""Secrets as files, one directory each: for one machine without Kubernetes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from leeway.deploy.credentials import Secret


class Folder:
    """Secrets below one directory. Whoever may enter it may read them: keep it private."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, names: Iterable[str]) -> dict[str, Secret]:
        """Those that are there, by name."""
        there = [self._directory / name for name in names]
        return {
            each.name: {file.name: file.read_bytes() for file in each.iterdir()}
            for each in there
            if each.is_dir()
        }

    def write(self, name: str, data: Secret) -> None:
        """Creates it, or puts the new data in its place."""
        place = self._directory / name
        place.mkdir(parents=True, exist_ok=True)
        for key, value in data.items():
            fresh = place / f".{key}"
            fresh.write_bytes(value)
            fresh.chmod(0o444)
            fresh.replace(place / key)
