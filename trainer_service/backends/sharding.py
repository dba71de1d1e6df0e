"""A model's parameters cut over all ranks (FSDP2), and made whole again.

Each rank holds a part of every parameter, along its first dimension; a layer is gathered when it is
computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from trainer_service.backends.torch_model import TorchModel


class Shards:
    """The parts of one model."""

    def __init__(
        self,
        root: TorchModel,
        device: torch.device,
        compute: torch.dtype,
        *,
        offload: bool,
    ) -> None:
        """Cuts the layers and what is left, in place, over all ranks.

        Args:
            compute: dtype of gathered weights; parts are float32.
            offload: Parts stay in the host's memory; gathered layers are on the device.
        """
        self._mesh: DeviceMesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._root: Any = root
        self._device = device
        self._shapes = {name: p.shape for name, p in root.model.named_parameters()}
        for module in (*root.layers(), root):
            sharded = fully_shard(
                module,
                mesh=self._mesh,
                mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
                offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            )
            assert isinstance(sharded, FSDPModule)
            # Micro-batches' losses add up; they are not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def reshard(self) -> None:
        """To be called when the last pass was without a backward: parameters lie in parts again."""
        self._root.reshard()

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor."""
        size, rank = self._mesh.size(), self._mesh.get_rank()
        parts = torch.chunk(whole, size, dim=0)
        return parts[rank] if rank < len(parts) else whole[:0]

    def whole(self, name: str, part: Tensor) -> Tensor:
        """All ranks' parts, on every rank: all call it in the same order."""
        shape = self._shapes[name]
        stride = torch.empty(shape, device="meta").stride()
        sharded = DTensor.from_local(
            part.to(self._device),
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=shape,
            stride=stride,
        )
        return sharded.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
