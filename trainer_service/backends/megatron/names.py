"""Hugging Face's names and shapes of weights, and Megatron's: one map, both ways. Pure.

Megatron joins what is multiplied with the same input, and cuts it over tensor-parallel ranks:

    linear_qkv   for each group of heads its queries, its key, its value
    linear_fc1   on each rank its part of gate_proj, then its part of up_proj
    experts      one parameter each; Hugging Face stacks a layer's experts in one tensor

Llama, Qwen2, Qwen3 and Qwen3-MoE; critics are named as transformers' token classifiers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from leeway.errors import ConfigError

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
VALUE_WEIGHT = "score.weight"
VALUE_BIAS = "score.bias"


class Join(Enum):
    """How Hugging Face's tensors become one parameter."""

    COPY = auto()
    """As it is, on every rank."""
    ROWS = auto()
    """Cut along the first dimension."""
    COLUMNS = auto()
    """Cut along the second dimension."""
    QKV = auto()
    GATE_UP = auto()
    EXPERT = auto()
    """One of a stack; not cut."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a Megatron parameter is made of.

    Attributes:
        names: Hugging Face's.
        expert: Of `Join.EXPERT`: its index among the rank's own.
    """

    join: Join
    names: tuple[str, ...]
    expert: int = 0


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of the whole model: `groups` of them share a key and a value."""

    count: int
    groups: int
    width: int


_IN_LAYER: dict[str, tuple[Join, tuple[str, ...]]] = {
    "input_layernorm.weight": (Join.COPY, ("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": (Join.COPY, ("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": (Join.COPY, ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": (Join.COPY, ("post_attention_layernorm.weight",)),
    "self_attention.q_layernorm.weight": (Join.COPY, ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": (Join.COPY, ("self_attn.k_norm.weight",)),
    "self_attention.linear_qkv.weight": (
        Join.QKV,
        tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    ),
    "self_attention.linear_qkv.bias": (Join.QKV, tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.linear_proj.weight": (Join.COLUMNS, ("self_attn.o_proj.weight",)),
    "mlp.linear_fc1.weight": (Join.GATE_UP, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": (Join.COLUMNS, ("mlp.down_proj.weight",)),
    "mlp.router.weight": (Join.COPY, ("mlp.gate.weight",)),
}
_OUTSIDE = {
    "embedding.weight": Source(Join.ROWS, (EMBEDDING,)),
    "decoder.final_layernorm.weight": Source(Join.COPY, ("model.norm.weight",)),
    "head.weight": Source(Join.ROWS, (HEAD,)),
    "value.weight": Source(Join.COPY, (VALUE_WEIGHT,)),
    "value.bias": Source(Join.COPY, (VALUE_BIAS,)),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")


def source(parameter: str, first_layer: int, *, tied: bool) -> Source:
    """
    Args:
        parameter: Megatron's name on this pipeline stage.
        first_layer: Index in the model of the stage's first layer.
        tied: The head's weight is the embedding's.

    Raises:
        ConfigError: The map does not know it.
    """
    if parameter == "head.weight" and tied:
        return _OUTSIDE["embedding.weight"]
    if parameter in _OUTSIDE:
        return _OUTSIDE[parameter]
    layer = _LAYER.fullmatch(parameter)
    if layer is None:
        raise ConfigError(f"trainer.backend = megatron: {parameter!r} has no Hugging Face name")
    prefix, rest = f"model.layers.{int(layer[1]) + first_layer}.", layer[2]
    if rest in _IN_LAYER:
        join, names = _IN_LAYER[rest]
        return Source(join, tuple(prefix + name for name in names))
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        raise ConfigError(f"trainer.backend = megatron: {parameter!r} has no Hugging Face name")
    stack = "gate_up_proj" if expert[2] == "1" else "down_proj"
    return Source(Join.EXPERT, (f"{prefix}mlp.experts.{stack}",), int(expert[1]))


def join(source: Source, tensors: Sequence[Tensor], heads: Heads, parts: int, part: int) -> Tensor:
    """A rank's parameter, of the whole tensors named by the source.

    Args:
        tensors: In the order of `source.names`; an expert's own tensor, not the stack.
        parts, part: Tensor-parallel ranks, and this one's index.
    """
    first = tensors[0]
    match source.join:
        case Join.COPY | Join.EXPERT:
            return first
        case Join.ROWS:
            return first.chunk(parts, 0)[part]
        case Join.COLUMNS:
            return first.chunk(parts, 1)[part]
        case Join.GATE_UP:
            return torch.cat([t.chunk(parts, 0)[part] for t in tensors])
        case Join.QKV:
            rest = first.shape[1:]
            grouped = [t.reshape(heads.groups, -1, *rest) for t in tensors]
            return torch.cat(grouped, 1).flatten(0, 1).chunk(parts, 0)[part]


def split(source: Source, parts: Sequence[Tensor], heads: Heads) -> list[Tensor]:
    """The whole tensors named by the source, of all ranks' parameters: undoes `join`."""
    match source.join:
        case Join.COPY | Join.EXPERT:
            return [parts[0]]
        case Join.ROWS:
            return [torch.cat(list(parts), 0)]
        case Join.COLUMNS:
            return [torch.cat(list(parts), 1)]
        case Join.GATE_UP:
            halves = [part.chunk(2, 0) for part in parts]
            return [torch.cat([half[which] for half in halves]) for which in (0, 1)]
        case Join.QKV:
            whole = torch.cat(list(parts), 0)
            grouped = whole.reshape(heads.groups, -1, *whole.shape[1:])
            queries = heads.count // heads.groups * heads.width
            cut = torch.split(grouped, [queries, heads.width, heads.width], 1)
            return [t.flatten(0, 1) for t in cut]
