"""The operators' commands against a queue service that runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leeway.local import free_addresses


def leeway(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leeway.cli", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(
        json.dumps(
            {
                "run": {"name": "operated", "directory": str(tmp_path / "runs")},
                "model": {"path": "unused"},
                "task": {"jsonl": "unused.jsonl", "reward": "unused.py:reward"},
                "queue": {"address": free_addresses(1)[0]},
                "security": {"token": "a-token"},
            }
        )
    )
    return file


def test_operators_see_and_steer_a_queue_that_runs(config: Path) -> None:
    service = subprocess.Popen(
        [sys.executable, "-m", "leeway.cli", "queue", str(config)], stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 60
        while (status := leeway("status", str(config))).returncode:
            assert time.monotonic() < end and service.poll() is None, status.stderr
        assert "run operated: version 0, budget 2" in status.stdout
        changed = leeway("queue", "budget", "4", str(config))
        assert changed.stdout == "staleness budget: 2 -> 4\n", changed.stderr
        assert "budget 4" in leeway("status", str(config)).stdout
        dead = leeway("queue", "dead", str(config), "--requeue")
        assert dead.stdout == "requeued: 0\n", dead.stderr
        refused = leeway("queue", "budget", "5", str(config), "security.token=wrong")
        assert refused.returncode != 0 and "missing or wrong token" in refused.stderr
        audited = leeway("queue", "audit", str(config))
        assert "budget 2 -> 4" in audited.stdout and "-> 5" not in audited.stdout, audited.stderr
        unknown = leeway("queue", "inspect", "nobody", str(config))
        assert unknown.returncode == 1 and "id = 'nobody'" in unknown.stderr
    finally:
        service.terminate()
        assert service.wait(30) == 0


def test_what_is_not_there_is_named(config: Path) -> None:
    for command, words in (("status", "leeway queue"), ("weights", "weight broadcast")):
        done = leeway(command, str(config), "weights.address=127.0.0.1:1")
        assert done.returncode == 1 and words in done.stderr, done.stderr


def test_the_resolved_configuration_is_shown_without_secrets(config: Path) -> None:
    shown = leeway("config", "show", str(config), "trainer.lr=1e-5")
    assert "lr: 1.0e-05" in shown.stdout and "a-token" not in shown.stdout
    wrong = leeway("config", "show", str(config), "trainer.lrr=1e-5")
    assert wrong.returncode == 2 and "did you mean 'lr'?" in wrong.stderr
