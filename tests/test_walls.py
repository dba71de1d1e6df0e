"""Imports run one way: leeway <- trajectory_queue <- rollout_service | trainer_service."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("leeway", "trajectory_queue", "rollout_service", "trainer_service")
MAY_IMPORT = {
    "leeway": set(),
    "trajectory_queue": {"leeway"},
    "rollout_service": {"leeway", "trajectory_queue"},
    "trainer_service": {"leeway", "trajectory_queue"},
}


def imports_of(path: Path, top_level_only: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        # The command imports a service when, and only when, its command runs.
        top_level_only = path == ROOT / "leeway" / "cli.py"
        above = imports_of(path, top_level_only) & set(PACKAGES) - MAY_IMPORT[package] - {package}
        assert not above, f"{path.relative_to(ROOT)} imports {above}"


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("leeway", {"torch", "redis", "transformers"}),
        ("trajectory_queue", {"torch"}),
        ("rollout_service/sandbox", {"torch", "redis", "transformers"}),
    ],
)
def test_the_core_imports_without_heavy_packages(package: str, heavy: set[str]) -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / package).rglob("*.py")
        if path.stem not in ("__init__", "__main__")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
