"""The trainer's step against a padded, plain Hugging Face step on the same trajectories.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/trainer.py [--short] [--model DIR]

Trained tokens per CPU-second of this process, one thread, SmolLM2-135M-Instruct in float32. The
sides run in turn; a key is the median over the repeats, and `spread` holds the lowest and highest
of each.

ratio_to_padded: Groups of 8 with log-normal answer lengths, the longest 5 times the median of 32; a
    group's prompt is as long as its mean answer. Tokens are random, so that nothing but the prompts
    is shared. The plain side is what a simple GRPO does: rows padded to the longest, logits and
    log_softmax at all positions, `clip_grad_norm_`, `torch.optim.AdamW`; four rows at a time. It
    takes 8 GB, Megatron another 3.
megatron_vs_torch: CPU-seconds of the Megatron backend's step over the torch backend's, on the same
    packed batches.
small_step_cpu_s: CPU-seconds of our step on 4 groups x 4 answers of 32 tokens, prompts of 60.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import finish
from leeway import models
from leeway.algorithm import AlgorithmConfig
from leeway.config import TrainerConfig
from leeway.process import keep_freed_memory
from leeway.trajectory import FinishReason, Group, Sampling, Task, Trajectory
from leeway.versions import VersionSpan
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.plan import plan_step
from trainer_service.backends.base import Backend
from trainer_service.backends.layout import Layout
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.backends.world import join

CONFIG = TrainerConfig(lr=1e-6, microbatch_tokens=2048)
ALGORITHM = AlgorithmConfig()
MEDIAN, LONGEST, SIGMA = 32, 160, 0.8
PADDED_ROWS = 4


def group(rng: np.random.Generator, number: int, lengths: Sequence[int], prompt: int) -> Group:
    """Random tokens; log-probabilities near a uniform policy's."""
    sampling = Sampling(max_new_tokens=LONGEST)
    task = Task(
        task_id=f"t{number}",
        sequence=number,
        messages=({"role": "user", "content": "?"},),
        columns={},
        group_size=len(lengths),
        sampling=sampling,
        seed=0,
    )
    start = rng.integers(3, 49152, prompt)
    members = []
    for index, length in enumerate(lengths):
        answer = rng.integers(3, 49152, length)
        members.append(
            Trajectory(
                trajectory_id=f"t{number}-{index}",
                task_id=task.task_id,
                index=index,
                token_ids=np.concatenate([start, answer]).astype(np.int32),
                prompt_length=prompt,
                logprobs=np.full(length, -10.8, dtype=np.float32),
                loss_mask=np.ones(length, dtype=np.bool_),
                versions=(VersionSpan(0, length),),
                finish_reason=FinishReason.STOP,
                sampling=sampling,
                reward=float(index % 2),
            )
        )
    return Group(task, tuple(members))


def ragged_groups(rng: np.random.Generator, count: int) -> list[Group]:
    lengths = np.exp(rng.normal(np.log(MEDIAN), SIGMA, (count, 8)))
    answers = np.clip(lengths, 1, LONGEST).astype(int)
    answers.flat[answers.argmax()] = LONGEST
    return [
        group(rng, number, row.tolist(), max(1, round(float(row.mean()))))
        for number, row in enumerate(answers)
    ]


def leeway_step(backend: Backend, groups: Sequence[Group]) -> None:
    plan = plan_step(
        groups,
        ALGORITHM,
        microbatch_tokens=CONFIG.microbatch_tokens,
        longest_answer=LONGEST,
    )
    backend.step(plan.microbatches, Objective(ALGORITHM, 0))


class PaddedTrainer:
    """The plain side."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=CONFIG.lr)

    def step(self, groups: Sequence[Group]) -> None:
        rows = [t for g in groups for t in g.trajectories]
        width = max(t.token_ids.size for t in rows)
        total = sum(t.trained_tokens for t in rows)
        for start in range(0, len(rows), PADDED_ROWS):
            part = rows[start : start + PADDED_ROWS]
            ids = torch.zeros(len(part), width, dtype=torch.long)
            attention, mask = torch.zeros_like(ids), torch.zeros(len(part), width)
            advantages = torch.tensor([2.0 * (t.reward or 0.0) - 1.0 for t in part])
            behaviour = torch.zeros(len(part), width)
            for row, t in enumerate(part):
                size = t.token_ids.size
                ids[row, :size] = torch.from_numpy(t.token_ids)
                attention[row, :size] = 1
                mask[row, t.prompt_length : size] = 1.0
                behaviour[row, t.prompt_length : size] = torch.from_numpy(t.logprobs)
            logits = self._model(input_ids=ids, attention_mask=attention, use_cache=False).logits
            logprobs = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
            weight = (logprobs.detach() - behaviour[:, 1:]).exp().clamp(max=5.0)
            ratio = (logprobs - logprobs.detach()).exp()
            clipped = torch.minimum(
                ratio * advantages[:, None], ratio.clamp(0.8, 1.28) * advantages[:, None]
            )
            (-(weight * clipped * mask[:, 1:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CONFIG.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()


def cpu_seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer groups and repeats")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Megatron-Core is not there for every Python.
    from trainer_service.backends.megatron.backend import MegatronBackend

    torch.set_num_threads(1)
    keep_freed_memory()
    rng = np.random.default_rng(arguments.seed)
    groups = ragged_groups(rng, 2 if arguments.short else 4)
    small = [group(rng, number, [32] * 4, 60) for number in range(4)]
    with join(Layout(), patience=60.0) as world:
        model = models.resolve(arguments.model)
        backend, padded = TorchBackend(model, CONFIG), PaddedTrainer(model)
        megatron = MegatronBackend(model, CONFIG, world=world)
        seconds = measure(
            {
                "packed": lambda: leeway_step(backend, groups),
                "megatron": lambda: leeway_step(megatron, groups),
                "padded": lambda: padded.step(groups),
                "small": lambda: leeway_step(backend, small),
            },
            repeats=1 if arguments.short else 3,
        )
    report(arguments.seed, groups, seconds)


def measure(sides: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """CPU-seconds of each side; the sides run in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    # The first round allocates optimizer state and warms the allocator; it does not count.
    for repeat in range(1 + repeats):
        for name, step in sides.items():
            spent = cpu_seconds(step)
            print(f"{name} {repeat}: {spent:.2f} CPU-s", flush=True)
            if repeat:
                seconds[name].append(spent)
    return seconds


def report(seed: int, groups: Sequence[Group], seconds: dict[str, list[float]]) -> None:
    tokens = sum(t.trained_tokens for g in groups for t in g.trajectories)
    ratios = [b / a for a, b in zip(seconds["packed"], seconds["padded"], strict=True)]
    megatron = [b / a for a, b in zip(seconds["packed"], seconds["megatron"], strict=True)]
    finish(
        seed,
        megatron_vs_torch=round(statistics.median(megatron), 3),
        ratio_to_padded=round(statistics.median(ratios), 2),
        packed_tokens_per_cpu_s=round(tokens / statistics.median(seconds["packed"]), 1),
        padded_tokens_per_cpu_s=round(tokens / statistics.median(seconds["padded"]), 1),
        small_step_cpu_s=round(statistics.median(seconds["small"]), 2),
        trained_tokens=tokens,
        spread={
            "megatron_vs_torch": [round(min(megatron), 3), round(max(megatron), 3)],
            "ratio_to_padded": [round(min(ratios), 2), round(max(ratios), 2)],
            "small_step_cpu_s": [round(min(seconds["small"]), 2), round(max(seconds["small"]), 2)],
        },
    )


if __name__ == "__main__":
    main()
