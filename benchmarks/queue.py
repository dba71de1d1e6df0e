"""Runs `queue_costs.py`, which says what it measures.

This file has the name of a module of the standard library, and Python looks into a script's folder
first. So it steps aside when some script of this folder means the library's.
"""

import importlib
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _FOLDER]
if __name__ == "queue":
    del sys.modules["queue"]
    sys.modules["queue"] = importlib.import_module("queue")
else:
    importlib.import_module("benchmarks.queue_costs").run()
