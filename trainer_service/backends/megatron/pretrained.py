"""A Hugging Face model directory, read tensor by tensor by the names of the loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from leeway.errors import ConfigError
from trainer_service.backends.files import TensorFiles


class Pretrained(TensorFiles):
    """In the files each expert has tensors of its own; the loaded model stacks them."""

    def __init__(
        self, directory: Path, experts: int, new: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """
        Args:
            experts: In a layer.
            new: Shapes of tensors that are 0 where the directory lacks them.

        Raises:
            ConfigError: The directory holds no safetensors, or one of `new` in another shape.
        """
        super().__init__(directory)
        self._experts = experts
        self._new = dict(new or {})
        for name, shape in self._new.items():
            found = tuple(self.read(name).shape)
            if found != shape:
                raise ConfigError(
                    f"{directory}: {name} is {list(found)}, here it must be {list(shape)}: a head "
                    "of one label"
                )

    def read(self, name: str) -> Tensor:
        """float32."""
        if name in self._new and name not in self:
            return torch.zeros(self._new[name])
        if name in self or ".mlp.experts." not in name:
            return super().read(name).to(torch.float32)
        layer, _, stack = name.rpartition(".")
        kinds = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
        experts = [
            torch.cat([TensorFiles.read(self, f"{layer}.{index}.{kind}.weight") for kind in kinds])
            for index in range(self._experts)
        ]
        return torch.stack(experts).to(torch.float32)
