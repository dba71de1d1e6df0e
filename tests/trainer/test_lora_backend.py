"""Adapters are trained, they or sums are published, and everything else is as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from leeway.config import TrainerConfig, UpdateMode
from leeway.manifests import Canary
from rollout_service.engines.torch_engine import TorchEngine
from tests.trainer.test_torch_backend import batches_of, weighted
from tests.trainer.trainer_cases import random_groups, tiny_model
from trainer_service.backends import lora
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.canary import scored_whole
from trainer_service.checkpoint import Checkpoints, export_hf

pytest.importorskip("peft")

CONFIG = TrainerConfig(lr=1e-2, lora_rank=4, lora_alpha=16)
BATCHES = batches_of(random_groups(2), 60)


def published(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        for name, bits in backend.weights()
    }


@pytest.mark.parametrize("family", ["llama-tied", "qwen2"])
def test_fresh_adapters_change_nothing(family: str, tmp_path: Path) -> None:
    directory = tiny_model(family, tmp_path)
    plain, adapted = TorchBackend(directory, TrainerConfig()), TorchBackend(directory, CONFIG)
    ours, theirs = published(adapted), published(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for one, other in zip(adapted.scores(BATCHES), plain.scores(BATCHES), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_only_adapters_are_trained_and_what_is_published_is_the_policy(tmp_path: Path) -> None:
    directory = tiny_model("qwen2", tmp_path / "model", scale=0.1)
    backend = TorchBackend(directory, CONFIG)
    before = published(backend)
    for _ in range(3):
        assert backend.step(BATCHES, weighted).grad_norm > 0.0
    assert all(lora.is_adapter(name) for name in backend._optimizer.masters())
    after = published(backend)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if name.endswith("_proj.weight")}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.load_state_dict({name: values.float() for name, values in after.items()})
    model.save_pretrained(tmp_path / "merged")
    merged = TorchBackend(tmp_path / "merged", TrainerConfig())
    for own, theirs in zip(backend.scores(BATCHES), merged.scores(BATCHES), strict=True):
        np.testing.assert_allclose(own, theirs, atol=2e-2)
        # The KL estimate that the engine check bounds by 0.01.
        ratio = theirs - own
        assert float(np.mean(np.expm1(ratio) - ratio)) < 1e-4


def test_adapters_resume_bitwise_and_are_exported_added(tmp_path: Path) -> None:
    directory = tiny_model("llama", tmp_path / "model")
    straight, first = TorchBackend(directory, CONFIG), TorchBackend(directory, CONFIG)
    straight.step(BATCHES, weighted)
    first.step(BATCHES, weighted)
    saved = Checkpoints(tmp_path / "run", run_id="r", model_hash="m", kept=1).save(1, first.save)
    resumed = TorchBackend(directory, CONFIG)
    resumed.load(saved.path)
    straight.step(BATCHES, weighted)
    resumed.step(BATCHES, weighted)
    ours, theirs = published(resumed), published(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    export_hf(saved.path, directory, tmp_path / "export", lora_alpha=CONFIG.lora_alpha)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    expected = published(first)
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter.detach(), expected[name])


def test_recomputed_activations_give_the_same_gradients(tmp_path: Path) -> None:
    directory = tiny_model("qwen3-tied", tmp_path)
    kept = TorchBackend(directory, TrainerConfig(lr=1e-2))
    recomputed = TorchBackend(directory, TrainerConfig(lr=1e-2, activation_checkpointing=True))

    def count(backend: TorchBackend) -> int:
        """Bytes kept for the backward pass."""
        sizes: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.__setitem__(t.data_ptr(), t.nbytes) or t, lambda t: t
        ):
            backend._scores(BATCHES[0])
        return sum(sizes.values())

    saved = [count(kept), count(recomputed)]
    assert saved[1] < 0.7 * saved[0]
    norms = [backend.step(BATCHES, weighted).grad_norm for backend in (kept, recomputed)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    ours, theirs = published(recomputed), published(kept)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


async def test_adapters_that_are_published_alone_are_the_policy(tmp_path: Path) -> None:
    """An engine that holds the base model and gets nothing else scores as the trainer does."""
    directory = tiny_model("llama", tmp_path, scale=0.1)
    alone = CONFIG.model_copy(update={"lora_publish": "adapters"})
    backend = TorchBackend(directory, alone)
    text = np.arange(3, 15, dtype=np.int32)
    engine = TorchEngine(directory, concurrency=2)
    try:
        for version in (1, 2):
            assert backend.step(BATCHES, weighted).grad_norm > 0.0
            adapters = dict(backend.weights())
            assert all(".lora_" in name for name in adapters)
            (logprobs,) = backend.scores([scored_whole(text.astype(np.int64))])
            # Raises CanaryError where the two disagree.
            canary = Canary(text, logprobs, tolerance=1e-4)
            await engine.swap(adapters, version, UpdateMode.IN_PLACE, canary)
    finally:
        await engine.close()
