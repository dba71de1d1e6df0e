"""One rank that learns each lesson, in many layouts one after the other, in float32.

    torchrun --nproc-per-node 2 -m tests.trainer.ranks_worker CASES.json MODEL OUT

Each case leaves what `learn` says below OUT/NUMBER.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from leeway.config import Config, load
from leeway.trajectory import Group
from tests.trainer.trainer_cases import group, random_groups, trajectory
from trainer_service.algorithms.critic import ValueLoss
from trainer_service.algorithms.objective import Objective
from trainer_service.backends.distributed import Leader, RankBackend, follow
from trainer_service.backends.layout import Layout
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.backends.torch_model import ValueModel
from trainer_service.backends.world import World, join
from trainer_service.learners import Learners
from trainer_service.offline import Lesson, lesson_step
from trainer_service.steps import plan_batch

STEPS = 2
PPO = "ppo"
"""Advantages from a critic."""


def configured() -> Config:
    """Gradients are not clipped, so that the first moments show them."""
    settings = ["lr=1e-2", "eps=1e-5", "max_grad_norm=1e9", "microbatch_tokens=40", "dpo_beta=0.5"]
    advantage = "trainer.algorithm.advantage={baseline: critic, normalise: batch, gae: {lam: 0.9}}"
    return load(
        None,
        ["model.path=m", "task.jsonl=r.jsonl", *(f"trainer.{s}" for s in settings), advantage],
        {},
    )


def rows(lesson: Lesson, step: int) -> list[Group]:
    """Five rows of ragged answers: one, or a chosen and a rejected one."""
    rng = np.random.default_rng(step)
    answers = 1 if lesson is Lesson.SFT else 2

    def tokens(longest: int) -> Sequence[int]:
        return [int(token) for token in rng.integers(0, 40, rng.integers(1, longest))]

    groups = []
    for row in range(5):
        prompt = tokens(9)
        members = [trajectory(prompt, tokens(16), task=f"t{row}", index=i) for i in range(answers)]
        groups.append(group(members, row))
    return groups


def written_step(lesson: Lesson, step: int, learners: Learners, config: Config) -> dict[str, float]:
    plan, loss = lesson_step(rows(lesson, step), lesson, config, learners.policy)
    result = learners.policy.step(plan.microbatches, loss)
    return {**loss.metrics(), "grad_norm": result.grad_norm}


def ppo_step(step: int, learners: Learners, config: Config) -> dict[str, float]:
    assert learners.critic is not None
    (plan,) = plan_batch(
        random_groups(step), config.trainer, learners.policy, learners.critic, longest_answer=12
    )
    objective = Objective(config.trainer.algorithm, 2, plan)
    values = ValueLoss(plan, config.trainer.critic.value_clip)
    learners.policy.step(plan.microbatches, objective)
    norm = learners.critic.step(plan.microbatches, values).grad_norm
    return {**values.metrics(), "loss_sum": objective.metrics()["loss_sum"], "critic_norm": norm}


def learn(learners: Learners, lesson: str, out: Path, config: Config) -> None:
    """Two steps: out/STEP holds the state after each, out/metrics.json their losses."""
    metrics = []
    for step in range(STEPS):
        if lesson == PPO:
            metrics.append(ppo_step(step, learners, config))
        else:
            metrics.append(written_step(Lesson(lesson), step, learners, config))
        (out / str(step)).mkdir(parents=True)
        learners.save(out / str(step))
    (out / "metrics.json").write_text(json.dumps(metrics))


def start(
    case: dict[str, str], model: Path, config: Config, world: World | None
) -> list[RankBackend]:
    backend: Any = TorchBackend
    values: Any = ValueModel
    if case["backend"] == "megatron":
        from trainer_service.backends.megatron.backend import MegatronBackend
        from trainer_service.backends.megatron.model import ValueModel as Cut

        backend, values = MegatronBackend, Cut
    reference = model if case["lesson"] == Lesson.DPO else None
    shared = {"precision": "fp32", "world": world}
    models = [backend(model, config.trainer, reference=reference, **shared)]
    if case["lesson"] == PPO:
        models.append(backend(model, config.trainer, kind=values, **shared))
    return models


def main() -> None:
    cases, model, out = (Path(argument) for argument in sys.argv[1:4])
    torch.set_num_threads(1)
    config = configured()
    for number, case in enumerate(json.loads(cases.read_text())):
        layout = Layout.parse(case["layout"], int(os.environ["WORLD_SIZE"]))
        with join(layout, 60.0) as world:
            models = start(case, model, config, world)
            if world.leads:
                leaders = Leader.of(models, world)
                learn(Learners(*leaders), case["lesson"], out / str(number), config)
                leaders[0].end()
            else:
                follow(models, world)
            dist.barrier()
        if case["backend"] == "megatron":
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
