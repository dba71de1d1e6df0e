"""What the benchmarks share: CPU time of whole process trees, and the last line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil

THREADS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}


class TreeClock:
    """CPU-seconds of a process and all its descendants, those that have ended included."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: dict[tuple[int, float], float] = {}

    def read(self) -> float:
        """Call it often: the time of a descendant that came and went in between is not counted."""
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            processes = []
        for process in processes:
            try:
                times = process.cpu_times()
                key = (process.pid, process.create_time())
            except psutil.NoSuchProcess:
                continue
            self._seen[key] = times.user + times.system
        return sum(self._seen.values())


def finish(seed: int, **figures: Any) -> None:
    """Prints the benchmark's last line."""
    figures |= {"seed": seed, "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps(figures))


def metrics_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]
