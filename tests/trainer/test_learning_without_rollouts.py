"""Supervised fine-tuning, preferences and a teacher: the tiny model learns each, on real runs."""

from __future__ import annotations

import asyncio
import json
import math
import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from leeway.algorithm import AdvantageConfig, AlgorithmConfig, KlConfig, KlEstimator, KlPlace
from leeway.config import Config, TrainerConfig, load
from leeway.errors import ConfigError, DataError
from leeway.tasks import Row
from leeway.trajectory import Group
from tests import tiny
from tests.trainer.trainer_cases import group, random_groups, tiny_model, trajectory
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.preference import Preference, Supervised
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.balance import ONE_RANK, Spread
from trainer_service.batching import pack
from trainer_service.demonstrations import Demonstrations
from trainer_service.offline import Lesson, serve
from trainer_service.packed import PackedBatch
from trainer_service.steps import plan_batch

WORDS = string.ascii_lowercase


def configured(directory: Path, rows: list[dict[str, Any]], *overrides: str) -> Config:
    (directory / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    model = directory / "model"
    return load(
        None,
        [
            f"run.directory={directory / 'runs'}",
            f"model.path={model if model.exists() else tiny.build(model)}",
            f"task.jsonl={directory / 'rows.jsonl'}",
            "trainer.batch_groups=13",
            "trainer.lr=3e-3",
            *overrides,
        ],
        {},
    )


def learn(config: Config, lesson: Lesson) -> list[dict[str, Any]]:
    asyncio.run(serve(config, lesson, stop=asyncio.Event()))
    lines = (config.run.path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def greedy(directory: Path, prompt: str, tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_sft_learns_the_answers_and_exports_a_model_that_gives_them(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {c}", "answer": f"{c}{c}"} for c in WORDS]
    curve = learn(configured(tmp_path, rows, "trainer.steps=60", "run.name=sft"), Lesson.SFT)
    losses = [row["loss_mean"] for row in curve]
    assert [row["step"] for row in curve] == list(range(1, 61))
    assert losses[0] > 2.0
    assert np.mean(losses[-5:]) < 0.3
    export = tmp_path / "runs" / "sft" / "checkpoints" / "export"
    assert [greedy(export, f"say {c}", 4) for c in "qxa"] == ["qq", "xx", "aa"]


def test_a_run_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {c}", "answer": f"{c}{c}"} for c in WORDS]
    weights = []
    for name, stages in (("whole", (6,)), ("parts", (2, 6))):
        for steps in stages:
            config = configured(tmp_path, rows, f"trainer.steps={steps}", f"run.name={name}")
            learn(config, Lesson.SFT)
        weights.append(load_file(config.run.path / "checkpoints/step-000006/weights.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_dpo_learns_to_prefer_the_chosen_answers(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {c}", "chosen": f"{c} yes", "rejected": f"{c} no"} for c in WORDS]
    config = configured(tmp_path, rows, "trainer.steps=15", "trainer.lr=1e-3")
    curve = learn(config, Lesson.DPO)
    assert curve[0]["loss_mean"] == pytest.approx(math.log(2.0), abs=1e-4)
    assert curve[0]["margin_mean"] == pytest.approx(0.0, abs=1e-4)
    assert np.mean([row["accuracy_mean"] for row in curve[-3:]]) > 0.95
    assert curve[-1]["loss_mean"] < 0.3


def pairs_of(
    answers: list[tuple[list[int], list[int]]], budget: int, spread: Spread = ONE_RANK
) -> list[PackedBatch]:
    """Chosen and rejected answers to the prompt 1, 2; tokens have -1 under the reference."""
    groups = [
        group([trajectory([1, 2], answer, task=f"t{n}", index=i) for i, answer in enumerate(both)])
        for n, both in enumerate(answers)
    ]
    sides, weights = np.tile([1.0, -1.0], len(groups)), np.full(2 * len(groups), 1 / len(groups))
    plan = pack(groups, sides, weights, budget, spread, whole_groups=True)
    return [
        replace(batch, reference=np.full(batch.targets.size, -1.0, dtype=np.float32))
        for batch in plan.microbatches
    ]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(("budget", "count"), [(1000, 1), (12, 2), (1, 3)])
def test_preferences_by_hand_however_the_pairs_are_split(
    budget: int, count: int, ranks: int
) -> None:
    """Every token gives 0.5 to the margin of its side."""
    answers = [([3, 4], [5]), ([6], [7, 8, 9]), ([3], [4])]
    batches = pairs_of(answers, budget, Spread(ranks))
    assert len(batches) == count if ranks == 1 else len(batches) >= min(ranks, 3)
    loss = Preference(beta=2.0)
    margins = [2.0 * 0.5 * (2 - 1), 2.0 * 0.5 * (1 - 3), 0.0]
    for batch in batches:
        assert np.unique(batch.sequences).size == 2 * np.unique(batch.sequences // 2).size
        logprobs = torch.full((batch.targets.size,), -0.5, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(batch, logprobs, logprobs), logprobs)
        for sequence, own in zip(batch.sequences.tolist(), gradient.tolist(), strict=True):
            slope = 2.0 / (1.0 + math.exp(margins[sequence // 2])) / 3
            assert own == pytest.approx(slope if sequence % 2 else -slope, rel=1e-5)
    metrics = loss.metrics()
    losses = [math.log1p(math.exp(-margin)) for margin in margins]
    assert metrics["loss_mean"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["margin_mean"] == pytest.approx(np.mean(margins), abs=1e-6)
    assert metrics["accuracy_mean"] == pytest.approx(1 / 3)


def test_the_gradient_of_a_preference_is_that_of_its_loss() -> None:
    (batch,) = pairs_of([([2, 3], [2, 4, 5])], 99)
    logprobs = torch.full((batch.targets.size,), -0.7, requires_grad=True)
    margin = (torch.from_numpy(batch.advantages) * (logprobs + 1.0)).sum()
    plain = -torch.nn.functional.logsigmoid(0.3 * margin)
    ours = Preference(beta=0.3)(batch, logprobs, logprobs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, logprobs), torch.autograd.grad(plain, logprobs)
    )


def test_a_preference_needs_the_reference_and_both_answers() -> None:
    (batch,) = pairs_of([([2], [3])], 99)
    scores = torch.zeros(2)
    with pytest.raises(DataError, match="reference"):
        Preference(0.1)(replace(batch, reference=None), scores, scores)
    with pytest.raises(DataError, match="different micro-batches"):
        Preference(0.1)(replace(batch, sequences=np.array([0, 2])), scores, scores)


@pytest.mark.parametrize("lesson", list(Lesson))
def test_poisoned_tokens_are_selected_away(lesson: Lesson) -> None:
    (batch,) = pairs_of([([3, 4], [5, 6])], 99)
    logprobs = torch.tensor([math.nan, -1.0, -1.0, -math.inf], requires_grad=True)
    loss = Supervised() if lesson is Lesson.SFT else Preference(0.1)
    value = loss(batch, logprobs, logprobs)
    (gradient,) = torch.autograd.grad(value, logprobs)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert gradient[[0, 3]].tolist() == [0.0, 0.0]
    assert (gradient[[1, 2]] != 0).all()


def test_demonstrations_end_where_a_model_should_stop(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.build(tmp_path / "model"))
    written = Demonstrations(tokenizer, 32)
    row = Row(({"role": "user", "content": "say a"},), {"answer": "a"})
    (own,) = written.group(row, ("answer",), 0).trajectories
    assert tokenizer.decode(own.token_ids[: own.prompt_length]) == "<user>say a<assistant>"
    assert own.token_ids[own.prompt_length :].tolist() == [
        *tokenizer.encode("a"),
        tokenizer.eos_token_id,
    ]
    with pytest.raises(DataError, match="chosen"):
        written.group(row, ("chosen", "rejected"), 0)
    with pytest.raises(DataError, match="context is 4"):
        Demonstrations(tokenizer, 4).group(row, ("answer",), 0)


# On-policy distillation --------------------------------------------------------------------------


class Student:
    """A tiny model that samples from its own current weights."""

    def __init__(self, directory: Path, backend: TorchBackend) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._backend = backend
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], count: int, length: int) -> list[Group]:
        for name, values in self._backend.weights():
            bits = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
            self._model.get_parameter(name).copy_(bits)
        groups = []
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([list(prompt)] * count)
            chosen = []
            for _ in range(length):
                scores = self._model(input_ids=ids).logits[:, -1].log_softmax(dim=-1)
                drawn = torch.multinomial(scores.exp(), 1, generator=self._generator)
                chosen.append(scores.gather(1, drawn))
                ids = torch.cat([ids, drawn], dim=1)
            logprobs = torch.cat(chosen, dim=1)
            members = [
                trajectory(
                    prompt,
                    ids[i, len(prompt) :].tolist(),
                    task=f"t{number}",
                    index=i,
                    logprobs=logprobs[i].tolist(),
                )
                for i in range(count)
            ]
            groups.append(group(members, number))
        return groups


def test_a_student_comes_near_its_teacher_without_any_reward(tmp_path: Path) -> None:
    student = tiny_model("llama", tmp_path / "student", seed=0)
    teacher = tiny_model("llama", tmp_path / "teacher", seed=1)
    trainer = TrainerConfig(
        lr=1e-2,
        reference=str(teacher),
        algorithm=AlgorithmConfig(
            advantage=AdvantageConfig(reward_coefficient=0.0),
            kl=KlConfig(coefficient=1.0, estimator=KlEstimator.K1, place=KlPlace.ADVANTAGE),
        ),
    )
    backend = TorchBackend(student, trainer, reference=teacher)
    sampler = Student(student, backend)
    curve = []
    for version in range(40):
        groups = sampler.sample([[2, 3], [4, 5], [6, 7], [8, 9]], count=16, length=6)
        (plan,) = plan_batch(groups, trainer, backend, longest_answer=6)
        objective = Objective(trainer.algorithm, version, plan)
        backend.step(plan.microbatches, objective)
        curve.append(objective.metrics()["reference_kl_mean"])
    # Two models of random weights: 2.5 nats a token at first, 1.2 in the end.
    assert np.mean(curve[-5:]) < 0.6 * np.mean(curve[:3])


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    student = tiny_model("llama", tmp_path / "student")
    teacher = tiny.build(tmp_path / "teacher")
    with pytest.raises(ConfigError, match="same tokenizer"):
        TorchBackend(student, TrainerConfig(), reference=teacher)


@pytest.mark.parametrize("place", list(KlPlace))
def test_a_batch_is_scored_by_the_reference_wherever_the_kl_enters(
    place: KlPlace, tmp_path: Path
) -> None:
    directory = tiny_model("llama", tmp_path)
    estimator = KlEstimator.K1 if place is KlPlace.ADVANTAGE else KlEstimator.K2
    kl = KlConfig(coefficient=0.1, estimator=estimator, place=place)
    trainer = TrainerConfig(minibatches=2, algorithm=AlgorithmConfig(kl=kl))
    backend = TorchBackend(directory, trainer, reference=directory)
    plans = plan_batch(random_groups(0, groups=4), trainer, backend, longest_answer=12)
    assert len(plans) == 2
    for plan in plans:
        for batch in plan.microbatches:
            np.testing.assert_array_equal(batch.proximal, batch.reference)
    plain = TrainerConfig(minibatches=2)
    (base, _) = plan_batch(random_groups(0, groups=4), plain, backend, longest_answer=12)
    shifted = not np.allclose(base.microbatches[0].advantages, plans[0].microbatches[0].advantages)
    assert shifted == (place is KlPlace.REWARD)
