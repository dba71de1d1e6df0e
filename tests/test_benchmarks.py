"""Every benchmark starts, also as a file; what it measures is for a quiet machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
# Another file stands before this one.
CALLED_BY = {"queue_costs": "queue"}
NAMES = [
    CALLED_BY.get(script.stem, script.stem)
    for script in sorted(FOLDER.glob("*.py"))
    if "ArgumentParser" in script.read_text()
]


@pytest.mark.parametrize("name", NAMES)
def test_it_says_how_to_call_it(name: str) -> None:
    command = [sys.executable, FOLDER / f"{name}.py", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.startswith(f"usage: {name}.py")
