"""Demonstrations, preferences and a critic teach on several ranks what they teach on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainer.ranks_worker import PPO, STEPS, configured, learn, rows, start
from tests.trainer.trainer_cases import tiny_model
from trainer_service.backends.files import OPTIMIZER, WEIGHTS, TensorFiles
from trainer_service.learners import CRITIC, Learners
from trainer_service.offline import Lesson, lesson_step

pytest.importorskip("megatron.core")

LAYOUTS = [
    ("torch", "dp=2"),
    ("megatron", "dp=2"),
    ("megatron", "tp=2"),
    ("megatron", "pp=2"),
    ("megatron", "cp=2"),
]
CASES = [(lesson, *own) for lesson in (PPO, *Lesson) for own in LAYOUTS]
KEYS = ("lesson", "backend", "layout")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    model = tiny_model("qwen2", directory / "model", rounded=False, scale=0.1, vocab_size=40)
    cases = directory / "cases.json"
    cases.write_text(json.dumps([dict(zip(KEYS, case, strict=True)) for case in CASES]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--module", "tests.trainer.ranks_worker"),
            *(str(cases), str(model), str(directory / "ranks")),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    config = configured()
    for lesson in (PPO, *Lesson):
        case = dict(zip(KEYS, (lesson, "torch", ""), strict=True))
        learners = Learners(*start(case, model, config, None))
        learn(learners, lesson, directory / lesson, config)
    return directory


def far(one: Path, other: Path, stem: str, prefix: str = "") -> float:
    """The largest difference between the tensors of two checkpoints."""

    def read(directory: Path) -> dict[str, Tensor]:
        files = TensorFiles(directory, stem)
        return {name: files.read(name) for name in files.names() if name.startswith(prefix)}

    own, theirs = read(one), read(other)
    assert own and own.keys() == theirs.keys()
    return max(float((own[name] - theirs[name]).abs().max()) for name in own)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_learn_what_one_process_learns(case: tuple[str, str, str], found: Path) -> None:
    own, alone = found / "ranks" / str(CASES.index(case)), found / case[0]
    losses = json.loads((own / "metrics.json").read_text())
    expected = json.loads((alone / "metrics.json").read_text())
    assert len(losses) == len(expected) == STEPS
    for one, other in zip(losses, expected, strict=True):
        assert one == pytest.approx(other, abs=5e-6, rel=1e-5)
    models = ("", CRITIC) if case[0] == PPO else ("",)
    for part in models:
        # After one step the first moment is a tenth of the gradient.
        assert far(own / "0" / part, alone / "0" / part, OPTIMIZER, "first.") < 1e-7
        # Adam moves a weight whose gradient is below its `eps` by lr/eps = 1,000 times what the
        # gradient's last bits differ by, which depend on the processor; weights have moved 0.02.
        assert far(own / "1" / part, alone / "1" / part, WEIGHTS) < 5e-5
        moved = TensorFiles(own / "1" / part, WEIGHTS).read("model.norm.weight")
        assert not torch.equal(TensorFiles(found / "model").read("model.norm.weight"), moved)


@pytest.mark.slow
def test_a_step_has_several_microbatches_that_hold_whole_pairs(found: Path) -> None:
    """Otherwise the comparison above would say little."""
    config = configured()
    case = dict(zip(KEYS, (Lesson.DPO, "torch", ""), strict=True))
    (backend,) = start(case, found / "model", config, None)
    for step in range(STEPS):
        plan, _ = lesson_step(rows(Lesson.DPO, step), Lesson.DPO, config, backend)
        assert len(plan.microbatches) >= 3
        for batch in plan.microbatches:
            held = set(batch.sequences.tolist())
            assert held == {s ^ 1 for s in held}
