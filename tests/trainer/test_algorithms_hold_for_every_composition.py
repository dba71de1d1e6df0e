"""What must never change a loss, and what must never break one: for every legal composition."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leeway.algorithm import AlgorithmConfig
from tests.trainer.algorithm_cases import algorithms
from tests.trainer.trainer_cases import random_groups
from trainer_service.algorithms.correction import correct
from trainer_service.algorithms.diagnostics import TokenSums
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.plan import plan_step
from trainer_service.algorithms.policy_loss import token_losses
from trainer_service.algorithms.tokens import Sequences, log_ratio
from trainer_service.packed import PackedBatch, StepPlan

GARBAGE = [float("nan"), float("inf"), float("-inf"), -9999.0, 1e30]
VERSION = 2


def evaluate(
    algorithm: AlgorithmConfig, arrays: list[Tensor], valid: Tensor, sequences: Tensor
) -> tuple[Tensor, Tensor]:
    """The corrected token losses, and the gradient of their sum.

    Args:
        arrays: float [n] each: current, proximal and behaviour log-probabilities, advantages.
    """
    current, proximal, behaviour, advantages = arrays
    current = current.clone().requires_grad_()
    owners = Sequences(sequences, valid)
    off_policy = log_ratio(proximal, behaviour, valid)
    correction = correct(algorithm, off_policy, advantages, valid, owners, 0.3)
    losses = token_losses(algorithm.policy, current, proximal, advantages, valid, owners)
    corrected = correction.applied * losses.loss
    (gradient,) = torch.autograd.grad(corrected.sum(), current)
    return corrected.detach(), gradient


@settings(max_examples=300, deadline=None)
@given(
    algorithm=algorithms(),
    seed=st.integers(0, 10_000),
    garbage=st.lists(st.sampled_from(GARBAGE), min_size=4, max_size=4),
)
def test_the_value_of_padding_does_not_matter(
    algorithm: AlgorithmConfig, seed: int, garbage: list[float]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    arrays = [-3 * torch.rand(24, generator=generator) for _ in range(3)]
    arrays.append(torch.randn(24, generator=generator))
    valid = torch.rand(24, generator=generator) < 0.6
    sequences = torch.arange(24) // 6
    clean, gradient = evaluate(algorithm, arrays, valid, sequences)
    spoiled = [torch.where(valid, a, v) for a, v in zip(arrays, garbage, strict=True)]
    dirty, dirty_gradient = evaluate(algorithm, spoiled, valid, sequences)
    assert torch.equal(clean, dirty)
    assert torch.equal(gradient, dirty_gradient)
    assert (gradient[~valid] == 0).all()
    kept = [a[valid] for a in arrays]
    alone, alone_gradient = evaluate(
        algorithm, kept, torch.ones(len(kept[0]), dtype=torch.bool), sequences[valid]
    )
    torch.testing.assert_close(alone, clean[valid])
    torch.testing.assert_close(alone_gradient, gradient[valid])


@settings(max_examples=300, deadline=None)
@given(
    algorithm=algorithms(),
    values=st.lists(
        st.tuples(*[st.floats(-1000.0, 0.0, width=32)] * 3, st.floats(-10.0, 10.0, width=32)),
        min_size=1,
        max_size=20,
    ),
)
def test_extreme_log_ratios_give_finite_losses_and_gradients(
    algorithm: AlgorithmConfig, values: list[tuple[float, float, float, float]]
) -> None:
    arrays = [torch.tensor(column, dtype=torch.float32) for column in zip(*values, strict=True)]
    count = len(values)
    loss, gradient = evaluate(
        algorithm, arrays, torch.ones(count, dtype=torch.bool), torch.arange(count) // 5
    )
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


class Policy:
    """Any function of the token will do for a policy."""

    def __init__(self, seed: int) -> None:
        self._logprobs = -0.1 - 3.0 * torch.rand(64, generator=torch.Generator().manual_seed(seed))

    def __call__(self, batch: PackedBatch) -> Tensor:
        return self._logprobs[torch.from_numpy(batch.targets % 64)]

    def array(self, batch: PackedBatch) -> Any:
        return self(batch).numpy()


CURRENT, START, REFERENCE = (Policy(seed) for seed in range(3))


def scored(plan: StepPlan) -> StepPlan:
    batches = [
        replace(batch, proximal=START.array(batch), reference=REFERENCE.array(batch))
        for batch in plan.microbatches
    ]
    return replace(plan, microbatches=tuple(batches))


def learn(
    objective: Objective, batch: PackedBatch, gradients: dict[int, Tensor]
) -> tuple[float, Tensor]:
    logprobs = CURRENT(batch).requires_grad_()
    entropy = logprobs.square()
    loss = objective(batch, logprobs, entropy)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    for sequence in np.unique(batch.sequences):
        gradients[int(sequence)] = gradient[torch.from_numpy(batch.sequences == sequence)]
    return float(loss.detach()), gradient


@settings(max_examples=150, deadline=None)
@given(
    algorithm=algorithms(),
    seed=st.integers(0, 10_000),
    budgets=st.tuples(st.integers(1, 60), st.integers(1, 200)),
    ranks=st.integers(1, 4),
)
def test_the_split_into_microbatches_and_over_ranks_does_not_matter(
    algorithm: AlgorithmConfig, seed: int, budgets: tuple[int, int], ranks: int
) -> None:
    groups = random_groups(seed)
    outcomes = []
    for budget, parts in zip(budgets, (1, ranks), strict=True):
        plan = scored(plan_step(groups, algorithm, microbatch_tokens=budget, longest_answer=12))
        loss, gradients, sums = 0.0, {}, TokenSums()
        for rank in range(parts):
            objective = Objective(algorithm, VERSION, plan)
            for batch in plan.microbatches[rank::parts]:
                loss += learn(objective, batch, gradients)[0]
            sums += objective.sums
        outcomes.append((loss, gradients, sums.metrics()))
    (loss, gradients, metrics), (other_loss, other_gradients, other_metrics) = outcomes
    assert loss == pytest.approx(other_loss, rel=1e-4, abs=1e-4)
    assert gradients.keys() == other_gradients.keys()
    for sequence, gradient in gradients.items():
        torch.testing.assert_close(gradient, other_gradients[sequence])
    assert metrics == pytest.approx(other_metrics, rel=1e-4, abs=1e-4)


@settings(max_examples=200, deadline=None)
@given(
    algorithm=algorithms(),
    seed=st.integers(0, 10_000),
    where=st.sampled_from(["logprobs", "entropy", "behaviour", "proximal", "reference"]),
    poison=st.sampled_from(GARBAGE[:3]),
)
def test_a_poisoned_token_is_masked_and_counted(
    algorithm: AlgorithmConfig, seed: int, where: str, poison: float
) -> None:
    plan = scored(
        plan_step(random_groups(seed), algorithm, microbatch_tokens=1000, longest_answer=12)
    )
    (batch,) = plan.microbatches
    place = seed % batch.targets.size
    logprobs = CURRENT(batch)
    entropy = torch.ones_like(logprobs)
    if where == "logprobs":
        logprobs[place] = poison
    elif where == "entropy":
        entropy[place] = poison
    else:
        values = getattr(batch, where).copy()
        values[place] = poison
        batch = replace(batch, **{where: values})
    objective = Objective(algorithm, VERSION, replace(plan, microbatches=(batch,)))
    logprobs.requires_grad_()
    loss = objective(batch, logprobs, entropy)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.isfinite(loss)
    assert gradient.isfinite().all()
    if where != "reference" or algorithm.needs_reference:
        assert gradient[place] == 0.0
        assert objective.metrics()["poisoned_tokens"] == 1
    metrics = objective.metrics()
    assert all(np.isfinite(value) for value in metrics.values())


def test_sums_add_up_field_by_field() -> None:
    one = TokenSums(**{f.name: float(i) for i, f in enumerate(fields(TokenSums))})
    two = TokenSums(**{f.name: 100.0 - i for i, f in enumerate(fields(TokenSums))})
    joined = one + two
    for field in fields(TokenSums):
        parts = getattr(one, field.name), getattr(two, field.name)
        expected = max(parts) if field.name.endswith("_max") else sum(parts)
        assert getattr(joined, field.name) == expected
