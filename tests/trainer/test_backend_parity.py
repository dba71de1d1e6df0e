"""Every backend in every layout is plain Hugging Face: losses, gradients, weights, checkpoints.

One world of four ranks runs all layouts, in float32: gloo on CPUs, nccl where there are GPUs enough
(`parity_worker.py`). The bounds are absolute, for gradients whose norm is about 1 and weights of
the order 0.1 that a step moves by up to 0.01.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.trainer.parity_worker import VALUES
from tests.trainer.trainer_cases import tiny_model, with_values

pytest.importorskip("megatron.core")

RANKS = 4
SHAPE = {"vocab_size": 40, "num_hidden_layers": 4}
RECOMPUTED = {"activation_checkpointing": True}
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("torch", "llama-tied", "dp=4", {}),
    ("megatron", "llama-tied", "tp=2,pp=2", {}),
    ("megatron", "llama-tied", "cp=2,tp=2", {}),
    ("megatron", "llama-tied", "pp=4", {}),
    ("torch", "llama-tied", "dp=4", RECOMPUTED),
    ("megatron", "qwen2", "pp=2,dp=2", {}),
    ("megatron", "qwen2", "cp=2,dp=2", RECOMPUTED),
    ("megatron", "qwen3", "tp=2,dp=2", RECOMPUTED),
    ("megatron", "qwen3", "dp=4", {}),
    ("torch", "qwen3-moe", "dp=4", {}),
    ("megatron", "qwen3-moe", "ep=2,dp=4", {}),
    ("megatron", "qwen3-moe", "tp=2,ep=2,dp=2", {}),
    ("megatron", "qwen3-moe", "pp=2,dp=2,ep=2", {}),
    ("torch", "llama-tied-values", "dp=4", {}),
    ("megatron", "llama-tied-values", "tp=2,pp=2", {}),
    ("megatron", "llama-tied-values", "cp=2,tp=2", RECOMPUTED),
    ("megatron", "llama-tied-values", "pp=4", {}),
    ("megatron", "llama-tied-values", "tp=2,dp=2", {}),
    ("megatron", "qwen3-moe-values", "tp=2,ep=2,dp=2", {}),
    ("megatron", "qwen3-moe-values", "pp=2,dp=2,ep=2", {}),
]
BOUNDS = {
    "loss": 1e-6,
    "scores": 5e-6,
    # Of weights that may differ as below.
    "moved": 5e-5,
    "gradients": 1e-6,
    "norm": 5e-6,
    "weights": 1e-5,
    "resumed": 1e-5,
    "reference": 1e-6,
}


def name(case: tuple[str, str, str, dict[str, Any]]) -> str:
    backend, family, layout, settings = case
    return "-".join([backend, family, layout, *settings])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    directory = tmp_path_factory.mktemp("parity")
    for family in {family for _, family, _, _ in CASES}:
        made = tiny_model(
            family.removesuffix(VALUES), directory / family, rounded=False, scale=0.1, **SHAPE
        )
        if family.endswith(VALUES):
            with_values(made, made)
    keys = ("backend", "family", "layout", "settings")
    devices = {} if torch.cuda.device_count() >= RANKS else {"CUDA_VISIBLE_DEVICES": ""}
    cases, out = directory / "cases.json", directory / "found.json"
    cases.write_text(json.dumps([dict(zip(keys, case, strict=True)) for case in CASES]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(RANKS), "--module", "tests.trainer.parity_worker"),
            *(str(cases), str(out)),
        ],
        capture_output=True,
        text=True,
        timeout=560,
        env={**os.environ, "OMP_NUM_THREADS": "1", **devices},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name(case): own for case, own in zip(CASES, json.loads(out.read_text()), strict=True)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_layout_trains_like_plain_hugging_face(
    case: tuple[str, str, str, dict[str, Any]], found: dict[str, dict[str, float]]
) -> None:
    """`scores`: before the first step; `moved`: after it; `resumed`: weights after a step on from a
    checkpoint that another layout wrote; `reference`: the frozen model scores as the policy did
    before its first step."""
    own = found[name(case)]
    bounds = dict(BOUNDS)
    if case[1].endswith(VALUES):
        # A critic has none.
        del bounds["reference"]
    assert {key: own[key] for key in bounds if own[key] > bounds[key]} == {}
