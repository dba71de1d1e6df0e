"""The key-value cache, and attention over it.

A step is one forward pass over packed tokens without padding: first one token for each of the
slots 0 .. decode-1, which attends to its slot, then joining sequences (spans), which attend to
themselves, and to the kept prefix that they begin with, and are written into slots. Slots are
dense: those in use are always the first ones, so attention reads nothing else. Keys lie transposed,
[layer, slot, head, dim, token], which makes both products of attention plain matrix products;
queries of a group share their key-value head without copies.

Hugging Face models reach this file through their attention interface, by the name `ATTENTION`, with
a `StepPlan` in the keyword arguments; nothing else of them is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "leeway_cache"
# Slots grow by so many tokens at a time; growing copies what is there.
GROWTH = 128
CHUNK = 32
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Packed tokens start .. stop-1 are a sequence, to be kept in `slots`: whole, or what follows
    the first `prefix` tokens of the kept prefix."""

    start: int
    stop: int
    slots: slice
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Decoding slots start .. stop-1, and the mask [slots, 1, 1, longest] over their tokens."""

    start: int
    stop: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The layout of one forward pass, the same for every layer."""

    cache: KVCache
    slots: Tensor
    positions: Tensor
    chunks: tuple[Chunk, ...]
    spans: tuple[Span, ...]

    @property
    def decode(self) -> int:
        return self.slots.numel()


class KVCache:
    """Keys and values of up to `slots` sequences; memory is used only where tokens are written."""

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        key_dim: int,
        value_dim: int | None = None,
        *,
        chunk: int = CHUNK,
    ) -> None:
        """`chunk`: decode attention handles so many neighbouring slots at once, padded to the
        longest of them."""
        self._key_shape = (layers, slots, heads, key_dim)
        self._value_shape = (layers, slots, heads)
        self._value_dim = value_dim if value_dim is not None else key_dim
        self._chunk = chunk
        self.clear()

    @property
    def capacity(self) -> int:
        """Tokens that fit into a slot."""
        return self._keys.shape[-1]

    def clear(self) -> None:
        """Forgets everything and gives the memory back."""
        self._keys = torch.empty(*self._key_shape, 0)
        self._values = torch.empty(*self._value_shape, 0, self._value_dim)
        self._prefix_keys = self._prefix_values = torch.empty(0)

    def keep_prefix(self, slot: int, tokens: int) -> None:
        """Keeps a copy of a slot's first tokens for spans that begin with them."""
        self._prefix_keys = self._keys[:, slot, ..., :tokens].clone()
        self._prefix_values = self._values[:, slot, :, :tokens].clone()

    def reserve(self, tokens: int, slots_in_use: int) -> None:
        """Makes slots of at least `tokens` tokens, keeping what the first `slots_in_use` hold."""
        old = self.capacity
        if tokens <= old:
            return
        capacity = -(-tokens // GROWTH) * GROWTH
        keys = _zeros((*self._key_shape, capacity))
        values = _zeros((*self._value_shape, capacity, self._value_dim))
        keys[:, :slots_in_use, ..., :old] = self._keys[:, :slots_in_use]
        values[:, :slots_in_use, :, :old] = self._values[:, :slots_in_use]
        self._keys, self._values = keys, values

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` tokens of one slot to another."""
        self._keys[:, target, ..., :tokens] = self._keys[:, source, ..., :tokens]
        self._values[:, target, :, :tokens] = self._values[:, source, :, :tokens]

    def plan(self, lengths: npt.NDArray[np.int64], spans: Sequence[Span]) -> StepPlan:
        """`lengths`: int64 [decode], tokens in each decoding slot, the new one included."""
        chunks = []
        for start in range(0, lengths.size, self._chunk):
            part = torch.from_numpy(lengths[start : start + self._chunk])
            beyond = torch.arange(int(part.max())) >= part[:, None, None, None]
            mask = torch.zeros(beyond.shape).masked_fill_(beyond, -torch.inf)
            chunks.append(Chunk(start, start + part.numel(), mask))
        return StepPlan(
            cache=self,
            slots=torch.arange(lengths.size),
            positions=torch.from_numpy(lengths - 1),
            chunks=tuple(chunks),
            spans=tuple(spans),
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, plan: StepPlan
    ) -> Tensor:
        """Writes new keys and values, and attends.

        Args:
            query: float32 [1, query heads, packed tokens, dim].
            key, value: float32 [1, key-value heads, packed tokens, dim].

        Returns:
            float32 [1, packed tokens, query heads, dim].
        """
        heads, packed = query.shape[1:3]
        out = query.new_empty(1, packed, heads, value.shape[-1])
        if plan.decode:
            self._decode(layer, query[0], key[0], value[0], scale, plan, out[0])
        for span in plan.spans:
            part = slice(span.start, span.stop)
            k, v = key[:, :, part], value[:, :, part]
            tokens = span.stop - span.start
            mask = None
            if span.prefix:
                past = self._prefix_keys[layer, :, :, : span.prefix].transpose(1, 2)
                k = torch.cat([past[None], k], dim=2)
                v = torch.cat([self._prefix_values[layer, None, :, : span.prefix], v], dim=2)
                mask = torch.ones(tokens, k.shape[2], dtype=torch.bool).tril(span.prefix)
                tokens = k.shape[2]
            attended = scaled_dot_product_attention(
                query[:, :, part],
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )
            out[:, part] = attended.transpose(1, 2)
            if span.slots.stop > span.slots.start:
                self._keys[layer, span.slots, :, :, :tokens] = k.transpose(2, 3)
                self._values[layer, span.slots, :, :tokens] = v
        return out

    def _decode(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        plan: StepPlan,
        out: Tensor,
    ) -> None:
        keys, values = self._keys[layer], self._values[layer]
        kv_heads, n = key.shape[0], plan.decode
        keys[plan.slots, :, :, plan.positions] = key[:, :n].transpose(0, 1)
        values[plan.slots, :, plan.positions] = value[:, :n].transpose(0, 1)
        # One matrix for each slot and key-value head; its rows are the query heads of that group.
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        queries = (query[:, :n] * scale).transpose(0, 1).reshape(n * kv_heads, -1, query.shape[-1])
        outputs = out[:n].view(n * kv_heads, -1, value.shape[-1])
        for chunk in plan.chunks:
            longest = chunk.mask.shape[-1]
            part = slice(chunk.start * kv_heads, chunk.stop * kv_heads)
            scores = torch.bmm(queries[part], keys[part, :, :longest])
            scores.view(-1, kv_heads, *scores.shape[1:]).add_(chunk.mask)
            torch.bmm(scores.softmax(-1), values[part, :longest], out=outputs[part])


def _zeros(shape: tuple[int, ...]) -> Tensor:
    """Zeros whose pages the system maps on first use, aligned as torch aligns its own."""
    size = int(np.prod(shape))
    flat = np.zeros(size + _ALIGNMENT // 4, dtype=np.float32)
    offset = -flat.ctypes.data % _ALIGNMENT // 4
    return torch.from_numpy(flat[offset : offset + size]).view(shape)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    leeway_plan: StepPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    assert leeway_plan is not None, "the engine passes a plan to every forward"
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return leeway_plan.cache.attend(layer, query, key, value, scale, leeway_plan), None


AttentionInterface.register(ATTENTION, _attention)
