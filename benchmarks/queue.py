"""Runs `queue_costs.py`, which says what it measures.

This file has the name of a module of the standard library, and Python looks into a script's folder
first. So it steps aside when some script of this folder means the library's.
"""

import importlib
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != _FOLDER]
_here = [entry for entry in sys.path if entry not in _elsewhere]

sys.path[:] = _elsewhere
if __name__ == "queue":
    del sys.modules["queue"]
    sys.modules["queue"] = importlib.import_module("queue")
    sys.path[:] = _here + _elsewhere
else:
    sys.path.append(str(_FOLDER))
    importlib.import_module("queue_costs").run()
