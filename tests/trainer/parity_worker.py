"""One rank of the parity suite: backends in many layouts against plain Hugging Face, in float32.

    torchrun --nproc-per-node 4 -m tests.trainer.parity_worker CASES.json OUT.json

A model of each family lies beside OUT.json, in a directory of its name; families that end with
VALUES are critics.

For each case the leader writes how far loss, scores, gradients, the gradient's norm and weights are
from those of a padded `AutoModelForCausalLM` (a critic's: `AutoModelForTokenClassification` of one
label) with `torch.optim.AdamW`; then the case's layout loads the checkpoint that the one before it
saved, and takes another step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from leeway.config import TrainerConfig
from leeway.trajectory import Group
from tests.trainer.trainer_cases import random_groups
from trainer_service.backends.distributed import RankBackend
from trainer_service.backends.layout import Layout
from trainer_service.backends.sharding import local
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.backends.torch_model import ValueModel
from trainer_service.backends.world import World, join
from trainer_service.batching import pack
from trainer_service.packed import PackedBatch

STEPS = 3
VALUES = "-values"
SQUARES = 0.05
SETTINGS: dict[str, Any] = {
    "lr": 1e-2,
    "eps": 1e-5,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "betas": (0.9, 0.95),
}
BUDGET = 60
"""Tokens a micro-batch: few enough for more micro-batches than ranks, and an odd number of them."""


def policy_loss(batch: PackedBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """A policy gradient with an entropy bonus."""
    weights = torch.from_numpy(batch.weights).to(logprobs.device)
    advantages = torch.from_numpy(batch.advantages).to(logprobs.device)
    return (-weights * (advantages * logprobs + 0.1 * entropy)).sum()


def value_loss(batch: PackedBatch, values: Tensor, entropy: Tensor) -> Tensor:
    """Squared errors of a critic for which a state is worth its trajectory's advantage, such that
    gradients are as large as the policy's."""
    weights = SQUARES * torch.from_numpy(batch.weights).to(values.device)
    targets = torch.from_numpy(batch.advantages).to(values.device)
    return (weights * (values - targets).square()).sum()


def steps() -> list[tuple[list[Group], np.ndarray, np.ndarray]]:
    """Groups, advantages and weights of each step."""
    made = []
    for step in range(STEPS):
        groups = random_groups(step, groups=5, temperature=0.8)
        rng = np.random.default_rng(step)
        count = sum(len(g.trajectories) for g in groups)
        made.append((groups, rng.normal(size=count), rng.uniform(0.005, 0.02, count)))
    return made


@dataclass
class Expected:
    """Of plain Hugging Face, at each step: before it, but for the weights. A critic's scores are
    values."""

    losses: list[float]
    scores: list[list[Tensor]]
    gradients: list[dict[str, Tensor]]
    norms: list[float]
    weights: list[dict[str, Tensor]]


def plain(directory: Path) -> Expected:
    critic = directory.name.endswith(VALUES)
    kind: Any = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    model: Any = kind.from_pretrained(directory, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    decay = SETTINGS["weight_decay"]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": decay},
            {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=SETTINGS["lr"],
        betas=SETTINGS["betas"],
        eps=SETTINGS["eps"],
    )
    expected = Expected([], [], [], [], [])
    for groups, advantages, weights in steps():
        trajectories = [t for g in groups for t in g.trajectories]
        ids = torch.zeros(len(trajectories), max(t.token_ids.size for t in trajectories)).long()
        mask = torch.zeros_like(ids)
        for row, t in enumerate(trajectories):
            ids[row, : t.token_ids.size] = torch.from_numpy(t.token_ids)
            mask[row, : t.token_ids.size] = 1
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        total, scores = torch.zeros(()), []
        for row, t in enumerate(trajectories):
            places = torch.from_numpy(t.prompt_length + np.flatnonzero(t.loss_mask))
            before = logits[row, places - 1]
            if critic:
                taken = before[:, 0]
                errors = taken - advantages[row]
                total = total + (SQUARES * weights[row] * errors.square()).sum()
            else:
                own = (before / 0.8).log_softmax(-1)
                taken = own.gather(1, ids[row, places, None]).squeeze(1)
                entropy = -(own.exp() * own).sum(1)
                total = total - (weights[row] * (advantages[row] * taken + 0.1 * entropy)).sum()
            scores.append(taken.detach())
        total.backward()
        expected.losses.append(total.item())
        expected.scores.append(scores)
        expected.gradients.append({n: p.grad.clone() for n, p in parameters.items()})
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), SETTINGS["max_grad_norm"])
        expected.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        expected.weights.append({n: p.detach().clone() for n, p in parameters.items()})
    return expected


def microbatches(step: int) -> Sequence[PackedBatch]:
    groups, advantages, weights = steps()[step]
    return pack(groups, advantages, weights, BUDGET).microbatches


def gradients(backend: RankBackend, world: World) -> dict[str, Tensor]:
    """Of what was accumulated, whole, by Hugging Face name; on the leader."""
    if isinstance(backend, TorchBackend):
        return {
            name: backend._whole(name, local(parameter.grad)).clone()
            for name, parameter in backend._trained()
        }
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([backend._parallel])
    parts = {name: piece.gradient.clone() for name, piece in backend._pieces.held.items()}
    stage = {name: whole.clone() for name, whole in backend._weights.whole_pieces(parts)}
    everywhere: list[Any] = [None] * world.size
    dist.all_gather_object(everywhere, stage)
    # `apply` would sum them once more.
    from trainer_service.backends.megatron import backend as module

    module.finalize_model_grads = lambda *_: setattr(
        module, "finalize_model_grads", finalize_model_grads
    )
    return {name: whole for stage in everywhere for name, whole in stage.items()}


def far(own: dict[str, Any], expected: dict[str, Tensor]) -> float:
    """The largest difference; the same names on both sides."""
    assert own.keys() == expected.keys(), own.keys() ^ expected.keys()
    return max(
        float((torch.as_tensor(own[name]).cpu() - values).abs().max())
        for name, values in expected.items()
    )


def start(case: dict[str, Any], directory: Path, world: World) -> RankBackend:
    config = TrainerConfig(**SETTINGS, **case.get("settings", {}))
    backend: Any = TorchBackend
    values: Any = ValueModel
    if case["backend"] == "megatron":
        from trainer_service.backends.megatron.backend import MegatronBackend
        from trainer_service.backends.megatron.model import ValueModel as Cut

        backend, values = MegatronBackend, Cut
    critic = directory.name.endswith(VALUES)
    what = {"kind": values} if critic else {"reference": directory}
    made: RankBackend = backend(directory, config, precision="fp32", world=world, **what)
    return made


def run(
    case: dict[str, Any], directory: Path, before: Path | None, after: Path, world: World,
    expected: Expected | None,
) -> dict[str, float]:  # fmt: skip
    began = time.process_time()
    backend = start(case, directory, world)
    critic = directory.name.endswith(VALUES)
    loss = value_loss if critic else policy_loss
    found = dict.fromkeys(("loss", "scores", "moved", "gradients", "norm", "weights"), 0.0)
    given = loss if world.leads else None
    for step in range(2):
        batches = microbatches(step)
        scored = backend.scores(batches)
        if step == 0:
            begun = scored
        losses: list[float] = []

        def counted(
            batch: PackedBatch, scores: Tensor, entropy: Tensor, losses: list[float] = losses
        ) -> Tensor:
            total = loss(batch, scores, entropy)
            losses.append(total.item())
            return total

        backend.accumulate(batches, counted if world.leads else None)
        own = gradients(backend, world)
        result = backend.apply()
        weights = dict(backend.weights())
        if expected is not None:
            found["loss"] = max(found["loss"], abs(sum(losses) - expected.losses[step]))
            found["norm"] = max(found["norm"], abs(result.grad_norm - expected.norms[step]))
            if step == 0:
                found["gradients"] = far(own, expected.gradients[step])
            found["scores" if step == 0 else "moved"] = max(
                float((torch.from_numpy(values[batch.sequences == s]) - lp).abs().max())
                for batch, values in zip(batches, scored, strict=True)
                for s, lp in enumerate(expected.scores[step])
                if (batch.sequences == s).any()
            )
            found["weights"] = max(found["weights"], far(weights, expected.weights[step]))
    if world.leads:
        after.mkdir()
    backend.save(after)
    if before is not None:
        backend.load(before)
    backend.accumulate(microbatches(2), given)
    backend.apply()
    if not critic:
        frozen = backend.scores(microbatches(0), reference=True)
        if world.leads:
            found["reference"] = max(
                float(np.abs(own - first).max()) for own, first in zip(frozen, begun, strict=True)
            )
    weights = dict(backend.weights())
    if expected is not None:
        found["resumed"] = far(weights, expected.weights[2])
    found["cpu_seconds"] = time.process_time() - began
    if case["backend"] == "megatron":
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    return found


def main() -> None:
    cases, out = (Path(argument) for argument in sys.argv[1:3])
    torch.set_num_threads(1)
    scratch = out.parent
    results = []
    lasts: dict[str, Path] = {}
    expected: dict[str, Expected] = {}
    size = int(os.environ["WORLD_SIZE"])
    for number, case in enumerate(json.loads(cases.read_text())):
        # A world for each layout: the leader's place depends on it.
        layout = Layout.parse(case["layout"], size)
        with join(layout, 60.0) as world:
            family = case["family"]
            directory = scratch / family
            if world.leads and family not in expected:
                expected[family] = plain(directory)
            dist.barrier()
            after = scratch / f"after-{number}"
            found = run(case, directory, lasts.get(family), after, world, expected.get(family))
            lasts[family] = after
            dist.barrier()
        results.append({**case, **found})
        if world.leads:
            print(json.dumps(results[-1]), flush=True)
            out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
