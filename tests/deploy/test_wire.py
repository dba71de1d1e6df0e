"""The two charts may differ by one release: the wire only ever grows.

`protos/released.binpb` is the wire of the newest release; `make release-protos` takes it anew.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.charts import ROOT

PROTOS = ROOT / "protos"
BUF = Path(sys.executable).with_name("buf")


def breaking(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [BUF, "breaking", "--against", PROTOS / "released.binpb"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_nothing_that_was_released_is_broken() -> None:
    done = breaking(PROTOS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("queue.proto", "  int64 previous = 1;", "  string previous = 1;"),
        ("queue.proto", "  rpc Fail(FailRequest) returns (FailResponse);", ""),
        ("weights.proto", "  NODE_STATE_FAILED = 3;", "  NODE_STATE_FAILED = 4;"),
    ],
)
def test_a_break_is_found(tmp_path: Path, file: str, old: str, new: str) -> None:
    copy = tmp_path / "protos"
    shutil.copytree(PROTOS, copy)
    path = copy / "leeway" / "v1" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert breaking(copy).returncode != 0
