"""Attention over packed segments, for any Hugging Face model that lets its attention be chosen.

Registered with transformers under `NAME`; the segments travel as a keyword argument of the model's
forward call. What must hold: a segment sees itself causally and the segments it continues wholly,
and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from leeway.errors import ConfigError
from trainer_service.packed import ROOT, Segment

NAME = "leeway_packed"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[Segment],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one micro-batch.

    Args:
        query: float [1, heads, T, d].
        key, value: float [1, key heads, T, d].
        attention_mask: None; the segments say it all.

    Returns:
        float [1, T, heads, d], and no attention weights.

    Raises:
        ConfigError: The model asks for a kind of attention that is not computed here.
    """
    for name, asked in (("softcap", softcap), ("s_aux", s_aux)):
        if asked is not None:
            raise ConfigError(f"{type(module).__name__}: attention with {name} is not supported")
    if sliding_window is not None and query.shape[2] > sliding_window:
        raise ConfigError(
            f"{type(module).__name__}: a micro-batch of {query.shape[2]} tokens does not fit in "
            f"the attention's sliding window of {sliding_window}; lower trainer.microbatch_tokens"
        )
    return attend(query, key, value, segments, range(len(segments)), scaling), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    own: Sequence[int],
    scaling: float | None,
) -> Tensor:
    """Attention of the queries of some segments, given the keys of all.

    Args:
        query: float [1, heads, tokens of the own segments, d].
        key, value: float [1, key heads, T, d].
        own: Indices of the segments whose queries are given, in their order.

    Returns:
        float [1, tokens of the own segments, heads, d].
    """
    lengths = [segment.length for segment in segments]
    keys, values = (torch.split(t, lengths, dim=2) for t in (key, value))
    queries = torch.split(query, [lengths[index] for index in own], dim=2)
    outputs = []
    for index, own_query in zip(own, queries, strict=True):
        segment = segments[index]
        own_key, own_value = keys[index], values[index]
        mask = None
        if segment.parent != ROOT:
            past = _ancestors(segments, index)
            own_key = torch.cat([*(keys[i] for i in past), own_key], dim=2)
            own_value = torch.cat([*(values[i] for i in past), own_value], dim=2)
            mask = _causal_mask(segment.length, own_key.shape[2], query.device)
        outputs.append(
            scaled_dot_product_attention(
                own_query,
                own_key,
                own_value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _ancestors(segments: Sequence[Segment], index: int) -> list[int]:
    """Indices of the segments that one continues, the root first."""
    path: list[int] = []
    parent = segments[index].parent
    while parent != ROOT:
        path.insert(0, parent)
        parent = segments[parent].parent
    return path


def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: the queries are the last of the keys."""
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return ones.tril(diagonal=keys - queries)


AttentionInterface.register(NAME, packed_attention)
