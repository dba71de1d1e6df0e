"""The short form of `make chaos`: real processes, killed and cut off at random."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.slow
def test_random_faults_lose_nothing_and_train_nothing_twice() -> None:
    command = [sys.executable, SCRIPT, "--faults", "20", "--mean-pause", "0.5"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    print(run.stdout)  # The seed is there.
    verdict = json.loads(run.stdout.splitlines()[-1])
    assert run.returncode == 0, verdict
    assert verdict["faults"] == 20
    assert verdict["lost"] == verdict["twice"] == verdict["over_budget"] == 0
    assert verdict["crashes"] == 0
    assert verdict["conserved"]
    assert verdict["finished"]
