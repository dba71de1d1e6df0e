"""Operations whose gradients PyTorch would not compute so: two sums of context parallelism, and an
embedding's rows."""

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


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(rows)
        return weight.detach()[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        (rows,) = ctx.saved_tensors
        total = ctx.weight.main_grad
        total.index_add_(0, rows.flatten(), gradient.flatten(0, -2).to(total.dtype))
        return None, None


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


def look_up(weight: Tensor, rows: Tensor) -> Tensor:
    """float [..., hidden], of int64 [...]. The gradient is added to `weight.main_grad`, a row for
    each token: a dense one of the whole vocabulary would cost a small model as much as a layer."""
    apply: Any = _LookUp.apply
    out: Tensor = apply(weight, rows)
    return out
