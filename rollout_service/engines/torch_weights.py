"""What the torch engine's model computes with, and how new weights get there.

`stage` does all that can be done while the model generates: it checks and converts. `write` is the
pause: it copies whole tensors, scatters changed elements and exchanges adapters.

Weights are bf16 values, held in float32: whatever arrives is rounded to bf16, so that the engine
holds the very numbers that the trainer computes with. LoRA adapters are applied beside the layer
that they belong to, as they arrive: merged into it they would be rounded away, and the pause would
be that of the layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear

from leeway.errors import EngineError
from rollout_service.engines.base import ChangedElements, Update

# PEFT's names: module.lora_A.weight [rank, in], module.lora_B.weight [out, rank].
_ADAPTER = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(slots=True, eq=False)
class Staged:
    """Checked and converted: only to be written.

    Attributes:
        whole: A parameter and all its values.
        elements: A flat parameter, int64 [k] positions and float32 [k] values.
        adapters: A module's name and its factors, A [rank, in] and B [out, rank], float32.
    """

    whole: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    elements: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    adapters: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class ModelWeights:
    """The parameters and adapters of a model. Its forward pass and `write` share one thread."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._modules = dict(model.named_modules())
        self._adapters: dict[str, dict[str, Tensor]] = {}
        for parameter in self._parameters.values():
            parameter.copy_(parameter.to(torch.bfloat16))

    def stage(self, updates: Mapping[str, Update]) -> Staged:
        """May run beside the forward pass.

        Raises:
            EngineError: a name, shape, dtype or position that the model does not have.
        """
        staged = Staged()
        for name, update in updates.items():
            if (adapter := _ADAPTER.fullmatch(name)) is not None:
                self._stage_adapter(staged, name, adapter["module"], adapter["factor"], update)
                continue
            parameter = self._parameters.get(name)
            if parameter is None:
                raise EngineError(
                    f"weight {name!r}: the model has no such tensor; send Hugging Face names, e.g. "
                    f"{next(iter(self._parameters))!r}"
                )
            if isinstance(update, ChangedElements):
                positions = _positions(name, update, parameter.numel())
                values = _tensor(name, update.values).to(torch.bfloat16).to(torch.float32)
                staged.elements.append((parameter.view(-1), positions, values))
                continue
            values = _tensor(name, update).to(torch.bfloat16)
            _check_shape(name, values, tuple(parameter.shape))
            staged.whole.append((parameter, values))
        for module, factors in staged.adapters.items():
            if factors.keys() != {"A", "B"} or factors["A"].shape[0] != factors["B"].shape[1]:
                shapes = {factor: list(tensor.shape) for factor, tensor in factors.items()}
                raise EngineError(
                    f"adapter of {module!r}: factors {shapes}; send lora_A [rank, in] and lora_B "
                    "[out, rank] of one rank"
                )
        return staged

    def write(self, staged: Staged) -> None:
        """Puts staged weights in place."""
        for parameter, values in staged.whole:
            parameter.copy_(values)
        for flat, positions, values in staged.elements:
            flat.index_copy_(0, positions, values)
        for name, factors in staged.adapters.items():
            if name not in self._adapters:
                self._apply_adapter(name)
            self._adapters[name] = factors

    def _stage_adapter(
        self, staged: Staged, name: str, module_name: str, factor: str, update: Update
    ) -> None:
        module = self._modules.get(module_name)
        if not isinstance(module, torch.nn.Linear):
            raise EngineError(f"adapter {name!r}: the model has no linear layer {module_name!r}")
        held = self._adapters.get(module_name, {})
        if isinstance(update, ChangedElements):
            if factor not in held:
                raise EngineError(f"adapter {name!r}: elements of a tensor that is not held")
            values = held[factor].clone()
            positions = _positions(name, update, values.numel())
            values.view(-1)[positions] = _tensor(name, update.values).to(torch.float32)
        else:
            values = _tensor(name, update).to(torch.float32)
            rank = values.shape[0 if factor == "A" else -1] if values.ndim else 0
            width = (rank, module.in_features) if factor == "A" else (module.out_features, rank)
            _check_shape(name, values, width)
        staged.adapters.setdefault(module_name, dict(held))[factor] = values

    def _apply_adapter(self, name: str) -> None:
        def add(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            factors = self._adapters[name]
            return output + linear(linear(inputs[0], factors["A"]), factors["B"])

        self._modules[name].register_forward_hook(add)


def _positions(name: str, update: ChangedElements, elements: int) -> Tensor:
    positions = update.positions
    if positions.shape != update.values.shape or positions.ndim != 1:
        raise EngineError(
            f"weight {name!r}: {positions.shape} positions for {update.values.shape} values"
        )
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < elements:
        raise EngineError(f"weight {name!r}: a position lies outside its {elements} elements")
    return torch.from_numpy(np.require(positions, requirements=["C", "W"]))


def _tensor(name: str, values: npt.NDArray[Any]) -> Tensor:
    array = np.require(values, requirements=["C", "W"])
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype != np.float32:
        raise EngineError(f"weight {name!r}: dtype {array.dtype}; send bf16 as uint16, or float32")
    return torch.from_numpy(array)


def _check_shape(name: str, values: Tensor, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise EngineError(
            f"weight {name!r}: shape {list(values.shape)}, the model's is {list(shape)}"
        )
