"""Whatever happens to the process, LATEST names a whole generation."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from leeway.algorithm import AlgorithmConfig
from leeway.config import TrainerConfig
from leeway.errors import ConfigError, DataError
from tests.trainer.trainer_cases import random_groups, tiny_model
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.plan import plan_step
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.checkpoint import Checkpoints, export_hf, model_hash

CONFIG = TrainerConfig(lr=1e-3, warmup_steps=3)
ALGORITHM = AlgorithmConfig()


def checkpoints(directory: Path, kept: int = 2, run_id: str = "run") -> Checkpoints:
    return Checkpoints(directory, run_id=run_id, model_hash="model", kept=kept)


def write_step(step: int):  # type: ignore[no-untyped-def]
    def write(directory: Path) -> None:
        (directory / "weights.safetensors").write_bytes(bytes([step]) * 1000)

    return write


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def train(backend: TorchBackend, steps: range) -> None:
    for step in steps:
        plan = plan_step(random_groups(step), ALGORITHM, microbatch_tokens=60, longest_answer=12)
        backend.step(plan.microbatches, Objective(ALGORITHM, step))


def test_the_newest_generations_stay(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path)
    assert saved.latest() is None
    for step in (1, 2, 5):
        saved.save(step, write_step(step), {"version": step, "sampler": {"epoch": 0}})
    assert names(tmp_path) == ["LATEST", "step-000002", "step-000005"]
    latest = checkpoints(tmp_path).latest()
    assert latest is not None
    assert (latest.step, latest.extra) == (5, {"version": 5, "sampler": {"epoch": 0}})
    assert (latest.path / "weights.safetensors").read_bytes() == b"\x05" * 1000


def test_generations_are_immutable(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path)
    saved.save(3, write_step(3))
    for step in (3, 2):
        with pytest.raises(DataError, match=f"step = {step}"):
            saved.save(step, write_step(step))


def test_what_latest_never_named_is_swept_and_written_anew(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(1, write_step(1))
    (tmp_path / "step-000002").mkdir()
    (tmp_path / ".partial-step-000003").mkdir()
    saved = checkpoints(tmp_path)
    assert names(tmp_path) == ["LATEST", "step-000001"]
    assert saved.save(2, write_step(2)).step == 2


def test_a_failed_write_leaves_the_last_generation(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path)
    saved.save(1, write_step(1))

    def fail(directory: Path) -> None:
        write_step(2)(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        saved.save(2, fail)
    latest = checkpoints(tmp_path).latest()
    assert latest is not None
    assert latest.step == 1


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_damage_is_noticed(damage: str, tmp_path: Path) -> None:
    path = checkpoints(tmp_path).save(1, write_step(1)).path / "weights.safetensors"
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(b"\x01" * 999 + (b"\x02" if damage == "flip" else b""))
    with pytest.raises(DataError, match=r"weights\.safetensors is missing or damaged"):
        checkpoints(tmp_path).latest()


def test_a_checkpoint_of_another_run_or_model_is_refused(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(1, write_step(1))
    with pytest.raises(ConfigError, match="run_id"):
        checkpoints(tmp_path, run_id="other").latest()
    with pytest.raises(ConfigError, match="model_hash"):
        Checkpoints(tmp_path, run_id="run", model_hash="other", kept=1).latest()


def save_for_ever(directory: Path) -> None:
    saved = checkpoints(directory)
    latest = saved.latest()
    for step in range(latest.step + 1 if latest else 1, 100_000):

        def write(partial: Path, step: int = step) -> None:
            for part in range(8):
                (partial / f"part-{part}").write_bytes(step.to_bytes(4, "little") * 20_000)

        saved.save(step, write, {"version": step})


def test_sigkill_at_any_moment_leaves_a_whole_generation(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    rng = np.random.default_rng(0)
    reached = 0
    for _ in range(12):
        before = (tmp_path / "LATEST").read_text() if (tmp_path / "LATEST").exists() else ""
        process = context.Process(target=save_for_ever, args=(tmp_path,))
        process.start()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if (tmp_path / "LATEST").exists() and (tmp_path / "LATEST").read_text() != before:
                break
            time.sleep(0.001)
        time.sleep(float(rng.random()) * 0.02)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        latest = checkpoints(tmp_path).latest()
        assert latest is not None
        assert latest.step > reached
        assert latest.extra == {"version": latest.step}
        for part in latest.path.glob("part-*"):
            assert part.read_bytes() == latest.step.to_bytes(4, "little") * 20_000
        reached = latest.step


@pytest.mark.parametrize("family", ["llama", "qwen3-tied"])
def test_resuming_is_bitwise_as_if_never_interrupted(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, tmp_path / "model")
    straight = TorchBackend(model, CONFIG)
    train(straight, range(5))
    first = TorchBackend(model, CONFIG)
    train(first, range(2))
    checkpoints(tmp_path / "run").save(2, first.save)
    second = TorchBackend(model, CONFIG)
    latest = checkpoints(tmp_path / "run").latest()
    assert latest is not None
    second.load(latest.path)
    train(second, range(2, 5))
    for (name, ours), (_, theirs) in zip(second.weights(), straight.weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    for name, master in straight._optimizer.masters().items():
        assert torch.equal(second._optimizer.masters()[name], master)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    llama = TorchBackend(tiny_model("llama", tmp_path / "a"), CONFIG)
    qwen = TorchBackend(tiny_model("qwen2", tmp_path / "b"), CONFIG)
    llama.save(tmp_path)
    with pytest.raises(ConfigError, match="on one side only"):
        qwen.load(tmp_path)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_the_export_loads_as_a_hugging_face_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    backend = TorchBackend(model, CONFIG)
    train(backend, range(2))
    saved = checkpoints(tmp_path / "run").save(2, backend.save)
    out = tmp_path / "export"
    for _ in range(2):
        export_hf(saved.path, model, out, lora_alpha=32)
    assert out.is_symlink() and names(tmp_path) == ["export", "export-000002", "model", "run"]
    assert names(out) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert exported.dtype is torch.bfloat16
    parameters = dict(exported.named_parameters())
    for name, values in backend.weights():
        theirs = parameters[name].detach().view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(theirs, values)


def test_the_model_hash_depends_on_weights_and_tokenizer(tmp_path: Path) -> None:
    first = model_hash(tiny_model("llama", tmp_path / "a"))
    assert model_hash(tiny_model("llama", tmp_path / "b")) == first
    assert model_hash(tiny_model("llama", tmp_path / "c", seed=1)) != first
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    assert model_hash(tmp_path / "b") != first
