"""With a budget of 0 the distributed run equals a plain synchronous loop, bit for bit."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from leeway.config import Config, UpdateMode, load
from leeway.tasks import Sampler, open_source
from leeway.trajectory import Group, Task, Trajectory
from rollout_service.engines.base import GenerateRequest
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.prompts import Renderer
from rollout_service.workflows.base import sample_seed
from tests import tiny
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.plan import plan_step
from trainer_service.backends.torch_backend import TorchBackend

STEPS = 5
REWARD = """
def reward(completion, **columns):
    return sum(character in "aeiou" for character in completion) / 12
"""


def make_config(directory: Path, *overrides: str) -> Config:
    rows = [{"prompt": f"say {word}", "answer": word} for word in "abcdefghijklmnopqrstuvwxyz"]
    (directory / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (directory / "rewards.py").write_text(REWARD)
    return load(
        None,
        [
            "run.name=sync",
            f"run.directory={directory / 'runs'}",
            "run.seed=3",
            f"model.path={tiny.build(directory / 'model')}",
            f"task.jsonl={directory / 'rows.jsonl'}",
            f"task.reward={directory / 'rewards.py'}:reward",
            "sampling.group_size=4",
            "sampling.max_new_tokens=12",
            "staleness.budget=0",
            "rollout.engine.deterministic=true",
            "trainer.batch_groups=4",
            f"trainer.steps={STEPS}",
            "trainer.lr=1e-3",
            *overrides,
        ],
        {},
    )


async def plain_loop(config: Config) -> dict[str, torch.Tensor]:
    """Sample a batch, learn from it, copy the weights over; nothing else."""
    model = Path(config.model.path)
    engine = TorchEngine(
        model,
        concurrency=config.rollout.most_concurrency,
        deterministic=config.rollout.engine.deterministic,
    )
    backend = TorchBackend(model, config.trainer)
    renderer = Renderer(
        AutoTokenizer.from_pretrained(model), engine.context_length, config.sampling.max_new_tokens
    )
    sampler = Sampler(open_source(config), config)
    reward = load_reward(config)
    for version in range(STEPS):
        groups: list[Group] = []
        while len(groups) < config.trainer.batch_groups:
            tasks = sampler.take(config.trainer.batch_groups - len(groups))
            sampled = await sample(engine, renderer, tasks, reward)
            groups += [g for g in sampled if len({t.score for t in g.trajectories}) > 1]
        plan = plan_step(
            groups,
            config.trainer.algorithm,
            microbatch_tokens=config.trainer.microbatch_tokens,
            longest_answer=config.sampling.max_new_tokens,
        )
        backend.step(plan.microbatches, Objective(config.trainer.algorithm, version))
        await engine.swap(dict(backend.weights()), version + 1, UpdateMode.IN_PLACE)
    await engine.close()
    directory = config.run.path / "plain"
    directory.mkdir(parents=True)
    backend.save(directory)
    return load_file(directory / "weights.safetensors")


async def sample(engine: TorchEngine, renderer: Renderer, tasks: list[Task], reward) -> list[Group]:
    prompts = {task.task_id: renderer.render(task.messages) for task in tasks}
    requests = {
        f"{task.task_id}/{index}": (task, index)
        for task in tasks
        for index in range(task.group_size)
    }
    samples: dict[str, list[Trajectory]] = {task.task_id: [] for task in tasks}
    generations = engine.generate(
        [
            GenerateRequest(name, prompts[task.task_id], task.sampling, sample_seed(task, index))
            for name, (task, index) in requests.items()
        ]
    )
    async for generation in generations:
        task, index = requests[generation.request_id]
        prompt = prompts[task.task_id]
        score = reward(renderer.text(generation.token_ids))
        samples[task.task_id].append(
            Trajectory(
                trajectory_id=generation.request_id,
                task_id=task.task_id,
                index=index,
                token_ids=np.concatenate([prompt, generation.token_ids]),
                prompt_length=prompt.size,
                logprobs=generation.logprobs,
                loss_mask=np.ones(generation.token_ids.size, dtype=np.bool_),
                versions=generation.versions,
                finish_reason=generation.finish_reason,
                sampling=task.sampling,
            ).scored(score)
        )
    return [
        Group(task, tuple(sorted(samples[task.task_id], key=lambda t: t.index))) for task in tasks
    ]


def load_reward(config: Config):
    spec = importlib.util.spec_from_file_location("r", config.task.reward.partition(":")[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward


@pytest.mark.slow
def test_a_run_with_budget_0_equals_a_plain_loop_bit_by_bit(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = make_config(tmp_path)
    expected = asyncio.run(plain_loop(config))
    file = tmp_path / "run.yaml"
    file.write_text(config.to_yaml())
    done = subprocess.run(
        [sys.executable, "-m", "leeway.cli", "up", str(file)],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trained = load_file(
        config.run.path / "checkpoints" / f"step-{STEPS:06d}" / "weights.safetensors"
    )
    assert trained.keys() == expected.keys()
    for name, weights in expected.items():
        assert torch.equal(trained[name], weights), f"{name} differs"
    summary = json.loads((config.run.path / "summary.json").read_text())
    assert (summary["staleness_max"], summary["lost"], summary["twice"]) == (0, 0, 0)
