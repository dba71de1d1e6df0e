"""The backend against a plain padded forward pass of the same model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from leeway.algorithm import AlgorithmConfig
from leeway.config import TrainerConfig
from leeway.errors import ConfigError
from leeway.trajectory import Group
from tests.trainer.trainer_cases import FAMILIES, group, random_groups, tiny_model, trajectory
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.plan import plan_step
from trainer_service.backends.base import DivergedError
from trainer_service.backends.optimizer import dithered
from trainer_service.backends.token_scores import token_scores
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.batching import pack
from trainer_service.packed import PackedBatch

CONFIG = TrainerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)


def weighted(batch: PackedBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """A loss whose gradient is another number for each trajectory."""
    return (torch.from_numpy(batch.advantages * batch.weights) * logprobs).sum()


def batches_of(groups: Sequence[Group], budget: int) -> tuple[PackedBatch, ...]:
    count = sum(len(g.trajectories) for g in groups)
    advantages = np.random.default_rng(3).normal(size=count)
    return pack(groups, advantages, np.full(count, 0.05), budget).microbatches


def padded(
    directory: Path, groups: Sequence[Group], temperature: float
) -> tuple[list[Tensor], list[Tensor], AutoModelForCausalLM]:
    """Log-probabilities and entropies of each trajectory's trained tokens, from padded rows."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    trajectories = [t for g in groups for t in g.trajectories]
    longest = max(t.token_ids.size for t in trajectories)
    ids = torch.zeros(len(trajectories), longest, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, t in enumerate(trajectories):
        ids[row, : t.token_ids.size] = torch.from_numpy(t.token_ids)
        attention[row, : t.token_ids.size] = 1
    logits = model(input_ids=ids, attention_mask=attention).logits / temperature
    distributions = logits.log_softmax(dim=-1)
    logprobs, entropies = [], []
    for row, t in enumerate(trajectories):
        positions = torch.from_numpy(t.prompt_length + np.flatnonzero(t.loss_mask))
        own = distributions[row, positions - 1]
        logprobs.append(own.gather(1, ids[row, positions, None]).squeeze(1))
        entropies.append(-(own.exp() * own).sum(dim=1))
    return logprobs, entropies, model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("budget", "temperature"), [(1000, 1.0), (30, 0.7)])
def test_scores_and_gradients_are_those_of_a_padded_pass(
    family: str, budget: int, temperature: float, tmp_path: Path
) -> None:
    directory = tiny_model(family, tmp_path)
    groups = random_groups(1, temperature=temperature)
    batches = batches_of(groups, budget)
    assert (len(batches) > 1) == (budget < 1000)
    backend = TorchBackend(directory, CONFIG)
    expected, expected_entropy, model = padded(directory, groups, temperature)
    advantages = np.random.default_rng(3).normal(size=len(expected))
    total = sum(0.05 * a * lp.sum() for a, lp in zip(advantages, expected, strict=True))
    torch.autograd.backward(total)

    for batch in batches:
        logprobs, entropy = backend._scores(batch)
        torch.autograd.backward(weighted(batch, logprobs, entropy))
        for sequence in np.unique(batch.sequences):
            own = torch.from_numpy(batch.sequences == sequence)
            torch.testing.assert_close(logprobs[own], expected[sequence], rtol=0, atol=1e-5)
            torch.testing.assert_close(entropy[own], expected_entropy[sequence], rtol=0, atol=1e-5)
        (alone,) = backend.scores([batch])
        np.testing.assert_array_equal(alone, logprobs.detach().numpy())
    own_gradients = dict(backend._scores.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            own_gradients[name].grad.to_dense(), parameter.grad, rtol=1e-5, atol=1e-5
        )


def test_a_step_is_that_of_adamw_on_the_masters(tmp_path: Path) -> None:
    directory = tiny_model("llama", tmp_path)
    groups = random_groups(2)
    batches = batches_of(groups, 1000)
    backend = TorchBackend(directory, CONFIG)
    reference = TorchBackend(directory, CONFIG)
    masters = {n: torch.nn.Parameter(p.clone()) for n, p in reference._optimizer.masters().items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in masters.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in masters.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=CONFIG.lr,
        betas=CONFIG.betas,
        eps=CONFIG.eps,
    )
    for _ in range(3):
        working = dict(reference._scores.model.named_parameters())
        with torch.no_grad():
            for name, parameter in working.items():
                parameter.copy_(masters[name].bfloat16())
                parameter.grad = None
        for batch in batches:
            torch.autograd.backward(weighted(batch, *reference._scores(batch)))
        for name, parameter in working.items():
            masters[name].grad = parameter.grad.to_dense()
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), CONFIG.max_grad_norm)
        optimizer.step()
        result = backend.step(batches, weighted)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert result.grad_norm > CONFIG.max_grad_norm
    for name, master in backend._optimizer.masters().items():
        torch.testing.assert_close(master, masters[name].data, rtol=1e-6, atol=1e-6)


def test_the_published_weights_are_those_of_the_forward_pass(tmp_path: Path) -> None:
    backend = TorchBackend(tiny_model("llama-tied", tmp_path), CONFIG)
    backend.step(batches_of(random_groups(3), 1000), weighted)
    published = dict(backend.weights())
    assert "lm_head.weight" not in published
    for name, working in backend._scores.model.named_parameters():
        values = torch.from_numpy(published[name].view(np.int16)).view(torch.bfloat16)
        assert torch.equal(values.float(), working.detach())
        assert torch.equal(values, backend._optimizer.masters()[name].bfloat16())


def test_fp32_weights_are_published_as_they_are(tmp_path: Path) -> None:
    backend = TorchBackend(tiny_model("qwen2", tmp_path), CONFIG, precision="fp32")
    backend.step(batches_of(random_groups(3), 1000), weighted)
    for name, values in backend.weights():
        np.testing.assert_array_equal(values, backend._optimizer.masters()[name].numpy())


def test_the_same_batches_give_bitwise_the_same_weights(tmp_path: Path) -> None:
    directory = tiny_model("qwen3-tied", tmp_path)
    runs = []
    for _ in range(2):
        backend = TorchBackend(directory, CONFIG)
        for seed in range(3):
            backend.step(batches_of(random_groups(seed), 40), weighted)
        runs.append(dict(backend._optimizer.masters()))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_without_microbatches_the_weights_stay(tmp_path: Path) -> None:
    backend = TorchBackend(tiny_model("llama", tmp_path), CONFIG)
    backend.step(batches_of(random_groups(0), 1000), weighted)
    before = [values.copy() for _, values in backend.weights()]
    assert backend.step((), weighted).grad_norm == 0.0
    for (_, values), old in zip(backend.weights(), before, strict=True):
        np.testing.assert_array_equal(values, old)


def test_a_gradient_that_is_not_finite_leaves_the_weights_untouched(tmp_path: Path) -> None:
    backend = TorchBackend(tiny_model("llama", tmp_path), CONFIG)
    before = [values.copy() for _, values in backend.weights()]
    batches = batches_of(random_groups(0), 1000)
    with pytest.raises(DivergedError, match="not finite"):
        backend.step(batches, lambda batch, logprobs, entropy: logprobs.sum() * float("inf"))
    for (_, values), old in zip(backend.weights(), before, strict=True):
        np.testing.assert_array_equal(values, old)
    assert backend.step(batches, weighted).grad_norm > 0.0


def test_learning_rate_warms_up(tmp_path: Path) -> None:
    config = TrainerConfig(lr=1e-3, warmup_steps=4)
    backend = TorchBackend(tiny_model("llama", tmp_path), config)
    batches = batches_of(random_groups(0), 1000)
    rates = [backend.step(batches, weighted).lr for _ in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_the_first_pass_yields_the_proximal_policy(tmp_path: Path) -> None:
    """Computed beforehand, as for several minibatches, the proximal values change nothing."""
    from dataclasses import replace

    directory = tiny_model("llama", tmp_path)
    groups = random_groups(5)
    algorithm = AlgorithmConfig()
    plan = plan_step(groups, algorithm, microbatch_tokens=50, longest_answer=12)
    own, given = TorchBackend(directory, CONFIG), TorchBackend(directory, CONFIG)
    own.step(plan.microbatches, Objective(algorithm, 0))
    scored = zip(plan.microbatches, given.scores(plan.microbatches), strict=True)
    given.step([replace(batch, proximal=p) for batch, p in scored], Objective(algorithm, 0))
    for name, master in own._optimizer.masters().items():
        assert torch.equal(master, given._optimizer.masters()[name])


def test_rewarded_answers_become_likelier(tmp_path: Path) -> None:
    backend = TorchBackend(tiny_model("llama", tmp_path), TrainerConfig(lr=3e-3))
    algorithm = AlgorithmConfig()
    answers = [([5, 6, 7], 1.0), ([8, 9, 10], 0.0)]
    for version in range(10):
        drawn = [trajectory([1, 2, 3], answer, index=i) for i, (answer, _) in enumerate(answers)]
        (probe,) = pack([group(drawn)], np.ones(2), np.ones(2), 100).microbatches
        (now,) = backend.scores([probe])
        if version == 0:
            first = now
        members = [
            trajectory([1, 2, 3], a, index=i, reward=r, logprobs=now[3 * i : 3 * i + 3].tolist())
            for i, (a, r) in enumerate(answers)
        ]
        plan = plan_step([group(members)], algorithm, microbatch_tokens=99, longest_answer=3)
        objective = Objective(algorithm, 0)
        backend.step(plan.microbatches, objective)
        assert abs(objective.metrics()["mismatch_kl_k1_mean"]) < 1e-5
    assert now[:3].sum() > first[:3].sum() + 0.5
    assert now[3:].sum() < first[3:].sum() - 0.5


def test_a_token_without_gradient_contributes_nothing_whatever_its_state() -> None:
    hidden = torch.randn(3, 4)
    head = torch.randn(11, 4)
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    logprobs, _ = token_scores(
        hidden, head, torch.ones(3), torch.arange(3), torch.tensor([1, 2, 3])
    )
    torch.autograd.backward(logprobs, torch.tensor([1.0, 0.0, -1.0]))
    assert (hidden.grad[1] == 0).all()
    assert hidden.grad[[0, 2]].abs().sum() > 0


@pytest.mark.parametrize("model", ["softcap", "mamba"])
def test_models_that_packing_cannot_follow_are_refused(model: str, tmp_path: Path) -> None:
    if model == "mamba":
        MambaForCausalLM(
            MambaConfig(vocab_size=37, hidden_size=16, num_hidden_layers=1, state_size=4)
        ).save_pretrained(tmp_path)
    else:
        Gemma2ForCausalLM(
            Gemma2Config(
                vocab_size=37,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
            )
        ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError):
        TorchBackend(tmp_path, CONFIG)


def test_a_model_with_scaled_embeddings_is_followed(tmp_path: Path) -> None:
    GemmaForCausalLM(
        GemmaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    ).save_pretrained(tmp_path)
    TorchBackend(tmp_path, CONFIG)


def test_masters_begin_spread_over_their_rounding_cells() -> None:
    """A step smaller than a cell moves a fair share of the bf16 weights, not none of them."""
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(100_000, generator=generator) * 0.05).to(torch.bfloat16).float()
    values[0] = 0.0
    masters = dithered("a", values)
    assert torch.equal(masters.to(torch.bfloat16).float(), values)
    cell = torch.exp2(torch.floor(torch.log2(values.abs().clamp_min(1e-30))) - 7)
    moved = (masters + 0.1 * cell).to(torch.bfloat16).float() != values
    assert 0.09 < float(moved.float().mean()) < 0.11
    assert torch.equal(dithered("b", masters), masters), "what is spread already stays"
    assert not torch.equal(dithered("b", values), masters), "each tensor's places are its own"


def test_the_reference_stays_as_it_was_loaded(tmp_path: Path) -> None:
    directory = tiny_model("llama-tied", tmp_path)
    backend = TorchBackend(directory, CONFIG, reference=directory)
    batches = batches_of(random_groups(3), 40)
    before = backend.scores(batches)
    for _ in range(3):
        backend.step(batches, weighted)
    for old, new, frozen in zip(
        before, backend.scores(batches), backend.scores(batches, reference=True), strict=True
    ):
        np.testing.assert_array_equal(old, frozen)
        assert np.abs(new - frozen).max() > 1e-3
    with pytest.raises(ConfigError, match="without a reference"):
        TorchBackend(directory, CONFIG).scores(batches, reference=True)
