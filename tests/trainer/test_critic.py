"""The critic: values of states, advantages and targets from them, its loss, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    MptConfig,
    MptForCausalLM,
)

from leeway.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    Baseline,
    GaeConfig,
    GaeStep,
    Normalise,
)
from leeway.config import TrainerConfig, load
from leeway.errors import ConfigError, DataError
from leeway.trajectory import Group
from tests.trainer.trainer_cases import group, random_groups, tiny_model, trajectory
from trainer_service.algorithms.critic import ValueLoss, estimate, mean_of
from trainer_service.algorithms.plan import TURN_REWARDS, plan_step
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.backends.torch_model import ValueModel
from trainer_service.batching import by_token, by_trajectory, pack
from trainer_service.launch import learners
from trainer_service.packed import StepPlan
from trainer_service.steps import plan_batch

MINIMAL = ["model.path=m", "task.jsonl=r.jsonl"]


def algorithm(gae: GaeConfig, normalise: Normalise = Normalise.NONE) -> AlgorithmConfig:
    return AlgorithmConfig(
        advantage=AdvantageConfig(baseline=Baseline.CRITIC, normalise=normalise, gae=gae)
    )


def test_a_token_is_a_step_and_its_turns_reward_comes_at_the_turns_end() -> None:
    config = GaeConfig(discount=0.5, lam=0.5)
    advantages, returns = estimate([1.0, 2.0], [0.5, 1.0, 2.0], [0, 0, 1], config)
    # Rewards 0, 1, 2. delta: 2 - 2 = 0; 1 + 0.5 * 2 - 1 = 1; 0 + 0.5 * 1 - 0.5 = 0.
    assert advantages.tolist() == [0.25, 1.0, 0.0]
    assert returns.tolist() == [0.75, 2.0, 2.0]


def test_a_turn_is_a_step_valued_before_its_first_token() -> None:
    config = GaeConfig(step=GaeStep.TURN, discount=0.5, lam=0.5)
    advantages, returns = estimate([1.0, 2.0], [0.5, 9.0, 1.0], [0, 0, 1], config)
    # delta: 2 - 1 = 1; 1 + 0.5 * 1 - 0.5 = 1.
    assert advantages.tolist() == [1.25, 1.25, 1.0]
    np.testing.assert_array_equal(returns, [1.75, math.nan, 2.0])


@pytest.mark.parametrize("step", list(GaeStep))
def test_a_trajectory_without_a_trained_token_has_no_step(step: GaeStep) -> None:
    advantages, returns = estimate([1.0], [], [], GaeConfig(step=step))
    assert advantages.size == returns.size == 0


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 80))
def test_scores_find_their_trajectories_and_back(seed: int, budget: int) -> None:
    groups = random_groups(seed)
    trajectories = [t for g in groups for t in g.trajectories]
    ones = np.ones(len(trajectories))
    batches = pack(groups, ones, ones, budget).microbatches
    scores = [batch.behaviour for batch in batches]
    found = by_trajectory(trajectories, batches, scores)
    for own, values in zip(trajectories, found, strict=True):
        np.testing.assert_array_equal(values, own.logprobs[own.loss_mask])
    for batch, score in zip(batches, scores, strict=True):
        np.testing.assert_array_equal(by_token(trajectories, batch, found), score)


def planned(groups: list[Group], values: list[np.ndarray], budget: int = 1000) -> StepPlan:
    return plan_step(
        groups,
        algorithm(GaeConfig(discount=0.9, lam=0.8)),
        microbatch_tokens=budget,
        longest_answer=12,
        values=values,
    )


@pytest.mark.parametrize("budget", [1000, 20])
def test_the_value_loss_by_hand_however_it_is_split(budget: int) -> None:
    groups = random_groups(4)
    trajectories = [t for g in groups for t in g.trajectories]
    rng = np.random.default_rng(0)
    old = [rng.normal(size=t.trained_tokens) for t in trajectories]
    plan = planned(groups, old, budget)
    assert (len(plan.microbatches) > 1) == (budget == 20)
    loss = ValueLoss(plan, clip=0.2)
    total, expected, clipped = 0.0, [], 0
    for batch in plan.microbatches:
        assert batch.values is not None and batch.returns is not None
        values = torch.from_numpy(batch.values) + torch.linspace(-0.5, 0.5, batch.values.size)
        total += float(loss(batch, values, values))
        for new, was, target in zip(values.tolist(), batch.values, batch.returns, strict=True):
            moved = was + min(max(new - was, -0.2), 0.2)
            clipped += (moved - target) ** 2 > (new - target) ** 2
            expected.append(0.5 * max((new - target) ** 2, (moved - target) ** 2))
    assert total == pytest.approx(np.mean(expected), rel=1e-5)
    metrics = loss.metrics()
    assert metrics["value_loss_mean"] == pytest.approx(total, rel=1e-5)
    assert metrics["value_clip_fraction"] == pytest.approx(clipped / len(expected))
    returns = np.concatenate([batch.returns for batch in plan.microbatches])
    errors = returns - np.concatenate([batch.values for batch in plan.microbatches])
    explained = 1.0 - errors.var() / returns.var()
    assert metrics["return_mean"] == pytest.approx(returns.mean(), abs=1e-5)
    assert metrics["value_explained_variance"] == pytest.approx(explained, rel=1e-3)
    assert mean_of([{"a": 1.0}, {"a": 2.0}]) == {"a": 1.5}
    assert mean_of([]) == {}


def test_poisoned_values_and_tokens_that_begin_no_step_do_not_count() -> None:
    plan = planned([group([trajectory([1], [2, 3, 4, 5])])], [np.zeros(4)])
    (batch,) = plan.microbatches
    returns = np.array([1.0, np.nan, 1.0, 1.0], dtype=np.float32)
    plan = replace(plan, microbatches=(replace(batch, returns=returns),))
    values = torch.tensor([0.1, 0.1, math.nan, -math.inf], requires_grad=True)
    loss = ValueLoss(plan, clip=0.5)(plan.microbatches[0], values, values)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 0.9**2 / 3)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.3, 0.0, 0.0, 0.0])
    with pytest.raises(DataError, match="values"):
        ValueLoss(replace(plan, microbatches=(replace(batch, values=None),)), 0.5)


def test_turns_share_an_advantage_and_have_one_target_each() -> None:
    own = trajectory([1], [2, 3, 4, 5, 6], mask=[True, True, False, True, True], reward=3.0)
    earned = np.array([1.0, 0.0, 0.0, 0.0, 0.0], dtype=np.float32)
    own = replace(own, extras=MappingProxyType({TURN_REWARDS: earned}))
    plan = plan_step(
        [group([own])],
        algorithm(GaeConfig(step=GaeStep.TURN)),
        microbatch_tokens=100,
        longest_answer=12,
        values=[np.array([0.5, 9.0, 1.0, 9.0])],
    )
    (batch,) = plan.microbatches
    assert batch.advantages.tolist() == [2.5, 2.5, 1.0, 1.0]
    np.testing.assert_array_equal(batch.returns, [3.0, np.nan, 2.0, np.nan])


# The model ---------------------------------------------------------------------------------------


def critic(directory: Path, **changes: float) -> TorchBackend:
    return TorchBackend(directory, TrainerConfig(**changes), precision="fp32", kind=ValueModel)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3-tied"])
def test_values_are_those_of_a_head_on_the_plain_model(family: str, tmp_path: Path) -> None:
    directory = tiny_model(family, tmp_path / "policy", rounded=False)
    groups = random_groups(1)
    trajectories = [t for g in groups for t in g.trajectories]
    ones = np.ones(len(trajectories))
    batches = pack(groups, ones, ones, 40).microbatches
    new = critic(directory)
    assert all(not values.any() for values in new.scores(batches))
    # A head that a directory has is kept.
    model = AutoModelForTokenClassification.from_pretrained(directory, num_labels=1)
    model.eval().save_pretrained(tmp_path / "critic")
    found = by_trajectory(trajectories, batches, critic(tmp_path / "critic").scores(batches))
    for own, values in zip(trajectories, found, strict=True):
        with torch.no_grad():
            plain = model(torch.from_numpy(own.token_ids)[None].long()).logits[0, :, 0]
        places = own.prompt_length - 1 + np.flatnonzero(own.loss_mask)
        np.testing.assert_allclose(values, plain[places], atol=1e-5)


def test_a_critic_learns_to_tell_states_apart(tmp_path: Path) -> None:
    """The first answer token says what an answer will earn."""
    backend = critic(tiny_model("llama", tmp_path), lr=1e-2)
    members = [
        trajectory([1, 2], [3 + i % 2, 7, 8], index=i, reward=float(i % 2)) for i in range(4)
    ]
    groups = [group(members)]
    trainer = TrainerConfig(algorithm=algorithm(GaeConfig()))
    losses = []
    for _ in range(60):
        (plan,) = plan_batch(groups, trainer, backend, backend, longest_answer=3)
        loss = ValueLoss(plan, clip=0.5)
        backend.step(plan.microbatches, loss)
        losses.append(loss.metrics()["value_loss_mean"])
    assert losses[0] == pytest.approx(0.25)
    # Before its first token nobody knows: a third of the steps keep half the variance.
    assert np.mean(losses[-5:]) == pytest.approx(0.125 / 3, abs=0.01)
    (batch,) = plan.microbatches
    assert batch.values is not None
    after = batch.values[batch.targets == 8]
    np.testing.assert_allclose(np.sort(after), [0, 0, 1, 1], atol=0.15)


def test_a_family_without_such_a_head_is_refused(tmp_path: Path) -> None:
    MptForCausalLM(MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=20)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError):
        critic(tmp_path)


@pytest.mark.parametrize("lora", [0, 2])
def test_the_trainers_models_are_saved_as_one(tmp_path: Path, lora: int) -> None:
    directory = tiny_model("llama", tmp_path / "model")
    config = TrainerConfig(lora_rank=lora, algorithm=algorithm(GaeConfig(), Normalise.BATCH))
    for number in range(2):
        with learners(config, directory, critic=directory) as models:
            assert models is not None and models.critic is not None
            if number:
                models.load(tmp_path / "0")
            (tmp_path / str(number)).mkdir()
            models.save(tmp_path / str(number))
    first, second = (
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*.safetensors")}
        for n in ("0", "1")
    )
    assert first == second and len(first) == 4
    plain = TrainerConfig(lora_rank=lora)
    with learners(plain, directory) as models:
        assert models is not None and models.critic is None
        (tmp_path / "2").mkdir()
        models.save(tmp_path / "2")
    with learners(config, directory, critic=directory) as models:
        assert models is not None
        with pytest.raises(ConfigError, match="critic"):
            models.load(tmp_path / "2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["advantage={baseline: critic}"], "normalise = group with baseline = critic"),
        (["advantage={baseline: group, gae: {lam: 0.9}}"], "gae with baseline = group"),
        (
            ["advantage={baseline: critic, normalise: batch, turn_discount: 0.9}"],
            "turn_discount = 0.9 with baseline = critic",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, [*MINIMAL, *(f"trainer.algorithm.{own}" for own in overrides)], {})


def test_a_critic_that_would_not_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="critic would not be used"):
        load(None, [*MINIMAL, "trainer.critic.lr=1e-4"], {})
    chosen = "trainer.algorithm.advantage={baseline: critic, normalise: batch}"
    single = load(None, [*MINIMAL, chosen, "sampling.group_size=1"], {})
    assert single.trainer.algorithm.advantage.needs_critic


def test_a_reward_models_head_is_kept_though_it_has_no_bias(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_model("llama", tmp_path / "policy", rounded=False), num_labels=1
    )
    model.save_pretrained(tmp_path / "rewards")
    groups = random_groups(1)
    ones = np.ones(sum(len(g.trajectories) for g in groups))
    batches = pack(groups, ones, ones, 40).microbatches
    assert all(values.all() for values in critic(tmp_path / "rewards").scores(batches))
