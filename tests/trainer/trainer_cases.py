"""Groups, micro-batches and tiny models for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from leeway.trajectory import FinishReason, Group, Sampling, Task, Trajectory
from leeway.versions import VersionSpan

VOCABULARY = 37
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3-tied")


def tiny_model(
    family: str,
    directory: Path,
    seed: int = 0,
    *,
    rounded: bool = True,
    scale: float = 0.3,
    **changes: int,
) -> Path:
    """Saves a random model, in float32, whose values are bf16 numbers if rounded.

    Args:
        scale: Standard deviation of the matrices' values.
        changes: To `SHAPE`.
    """
    torch.manual_seed(seed)
    tied = family.endswith("-tied")
    shape = {**SHAPE, "tie_word_embeddings": tied, **changes}
    model: PreTrainedModel
    match family.removesuffix("-tied"):
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**shape))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**shape))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
        case "qwen3-moe":
            model = Qwen3MoeForCausalLM(
                Qwen3MoeConfig(
                    **shape,
                    moe_intermediate_size=24,
                    num_experts=4,
                    num_experts_per_tok=2,
                    norm_topk_prob=True,
                    decoder_sparse_step=1,
                    mlp_only_layers=[],
                )
            )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(scale * torch.randn_like(parameter))
            if rounded:
                parameter.copy_(parameter.bfloat16())
    model.save_pretrained(directory)
    return directory


def with_values(model: Path, directory: Path) -> Path:
    """Saves the model with a random head of one label, and a bias, in place of its own."""
    critic = AutoModelForTokenClassification.from_pretrained(model, num_labels=1)
    with torch.no_grad():
        for parameter in critic.score.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    critic.save_pretrained(directory)
    return directory


def trajectory(
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    task: str = "t0",
    index: int = 0,
    mask: Sequence[bool] | None = None,
    logprobs: Sequence[float] | None = None,
    reward: float | None = 0.0,
    version: int = 0,
    sampling: Sampling | None = None,
) -> Trajectory:
    loss_mask = np.array([True] * len(answer) if mask is None else mask, dtype=np.bool_)
    values = np.full(len(answer), -1.0) if logprobs is None else np.array(logprobs)
    return Trajectory(
        trajectory_id=f"{task}-{index}",
        task_id=task,
        index=index,
        token_ids=np.array([*prompt, *answer], dtype=np.int32),
        prompt_length=len(prompt),
        logprobs=np.where(loss_mask, values, 0.0).astype(np.float32),
        loss_mask=loss_mask,
        versions=(VersionSpan(version, len(answer)),) if len(answer) else (),
        finish_reason=FinishReason.STOP,
        sampling=sampling or Sampling(),
        reward=reward,
    )


def group(trajectories: Sequence[Trajectory], sequence: int = 0) -> Group:
    task = Task(
        task_id=trajectories[0].task_id,
        sequence=sequence,
        messages=({"role": "user", "content": "?"},),
        columns={},
        group_size=len(trajectories),
        sampling=trajectories[0].sampling,
        seed=0,
    )
    return Group(task, tuple(trajectories))


def random_groups(
    seed: int,
    groups: int = 3,
    size: int = 4,
    *,
    prompt: tuple[int, int] = (1, 9),
    answer: tuple[int, int] = (1, 12),
    temperature: float = 1.0,
) -> list[Group]:
    """Groups of ragged answers to shared prompts, with tool spans in between and mixed rewards."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(groups):
        start = rng.integers(0, VOCABULARY, int(rng.integers(*prompt)))
        members = []
        for index in range(size):
            length = int(rng.integers(*answer))
            mask = rng.random(length) < 0.8
            mask[rng.integers(length)] = True
            members.append(
                trajectory(
                    start.tolist(),
                    rng.integers(0, VOCABULARY, length).tolist(),
                    task=f"t{number}",
                    index=index,
                    mask=mask.tolist(),
                    logprobs=(-4.0 * rng.random(length)).tolist(),
                    reward=float(rng.normal()),
                    version=int(rng.integers(0, 3)),
                    sampling=Sampling(temperature=temperature),
                )
            )
        made.append(group(members, number))
    return made
