"""What benchmarks take from the product is there, also what they import only when they run."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
PRODUCT = ("leeway", "trajectory_queue", "rollout_service", "trainer_service")


def taken(source: str) -> list[tuple[str, str]]:
    """(module, name) of each `from module import name` out of the product."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.partition(".")[0] in PRODUCT
        for alias in node.names
    ]


@pytest.mark.parametrize("script", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_its_imports_are_there(script: Path) -> None:
    for module, name in taken(script.read_text()):
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")
