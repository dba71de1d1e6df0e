"""The two sums of context parallelism, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(out, own.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = gradient.shape[0] // ctx.group.size()
        own = gradient.new_empty(size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.group)
        return own, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def gather_tokens(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """float [s, ...] of each rank -> [ranks * s, ...], rank by rank. What all ranks' results owe to
    this rank's tokens adds up in their gradient."""
    apply: Any = _Gather.apply
    out: Tensor = apply(own, group)
    return out


def sum_parts(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks that go on with it alike: each rank's gradient is its own."""
    apply: Any = _Sum.apply
    out: Tensor = apply(own, group)
    return out
