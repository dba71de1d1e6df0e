"""Low-rank adapters (LoRA, arXiv:2106.09685): W + alpha / rank * B A, with W frozen.

peft puts the adapters into the model. Exports get the sums, under the model's own names, and so do
nodes unless `trainer.lora_publish` says that their engines add adapters themselves. The sums are
rounded to bf16, which the trainer's own pass is not: `mismatch_kl` shows by how little the two
sides then differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from leeway.config import TrainerConfig
from leeway.errors import ConfigError

_BASE = ".base_layer."
_A, _B = ".lora_A.default.", ".lora_B.default."


def add_adapters(model: nn.Module, config: TrainerConfig) -> None:
    """To all linear layers but the head, in place; everything else is frozen.

    Every life begins with the same ones.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"trainer.lora_rank = {config.lora_rank}: adapters are peft's; install leeway[lora]"
        ) from error

    adapters = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(0)
        inject_adapter_in_model(adapters, model)


def is_adapter(name: str) -> bool:
    return _A in name or _B in name


def adapted(name: str) -> str:
    """The name of the weight that an adapter's `A` belongs to; "" for other names."""
    return name.replace(_A, ".") if _A in name else ""


def pair(a: str) -> str:
    """`B`'s name, given `A`'s."""
    return a.replace(_A, _B)


def merge(weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """W + alpha / rank * B A.

    Args:
        weight: float [out, in].
        a: float [rank, in].
        b: float [out, rank].
    """
    return weight + (alpha / a.shape[0]) * (b @ a)


def merged(
    model: nn.Module, whole: Callable[[str, Tensor], Tensor], alpha: float
) -> Iterator[tuple[str, Tensor]]:
    """(the model's own name, sum) of every weight of a model, adapted or not.

    Args:
        whole: Of a parameter's name and value: the value, not cut. Called for the same parameters
            in the same order on all ranks.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        weight = whole(name, parameter)
        if _BASE in name and name.endswith(".weight"):
            a = name.replace(_BASE, _A)
            b = pair(a)
            weight = merge(weight, whole(a, parameters[a]), whole(b, parameters[b]), alpha)
        yield name.replace(_BASE, "."), weight


def separate(
    model: nn.Module, whole: Callable[[str, Tensor], Tensor], alpha: float
) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, value) of every adapter, with alpha / rank in its `B`.

    Args:
        whole: As for `merged`.
    """
    for name, parameter in model.named_parameters():
        if _A in name:
            yield name.replace(_A, ".lora_A."), whole(name, parameter)
        elif _B in name:
            b = whole(name, parameter)
            yield name.replace(_B, ".lora_B."), b * (alpha / b.shape[1])
