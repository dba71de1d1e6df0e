"""What of a rank's parameters its optimizer holds.

Megatron lays parameters and gradients out in buckets, reduces a bucket's gradient so that each
data-parallel rank gets one slice of it (the distributed optimizer), and gathers the updated slices.
A piece is where a parameter and the rank's slice meet. It follows bucket borders, not tensors'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Part of one parameter.

    Attributes:
        start, end: In the flattened parameter.
        working, gradient: Views, float [end - start]; the gradient is float32.
    """

    start: int
    end: int
    working: Tensor
    gradient: Tensor


class Pieces:
    """This rank's pieces by parameter name; none where its slice misses the parameter."""

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        """None of a model that is not trained."""
        self._groups: dict[str, dist.ProcessGroup] = {}
        self.held: dict[str, Piece] = {}
        if model is not None:
            self._find(model)

    def whole(self, name: str, shape: torch.Size, parts: Mapping[str, Tensor]) -> Tensor:
        """The parameter of which data-parallel ranks hold parts, float32, on all of them."""
        flat = torch.zeros(shape.numel(), dtype=torch.float32, device=torch.cuda.current_device())
        if name in self.held:
            piece = self.held[name]
            flat[piece.start : piece.end] = parts[name]
        dist.all_reduce(flat, group=self._groups[name])
        return flat.view(shape)

    def _find(self, model: DistributedDataParallel) -> None:
        names = {parameter: name for name, parameter in model.module.named_parameters()}
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // group.size()
                first = bucket.offset + group.rank() * size
                for parameter in bucket.params_list:
                    name = names[parameter]
                    self._groups[name] = group
                    start, end, _ = buffer.param_index_map[parameter]
                    low, high = max(start, first), min(end, first + size)
                    if low < high:
                        self.held[name] = Piece(
                            low - start,
                            high - start,
                            buffer.param_data[low:high],
                            buffer.grad_data[low:high],
                        )
