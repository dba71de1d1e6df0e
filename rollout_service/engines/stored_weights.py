"""The weights of a Hugging Face model directory, as updates name and hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

Weights = dict[str, npt.NDArray[Any]]
"""By Hugging Face name; bf16 as uint16."""


def load_weights(directory: Path) -> Weights:
    weights: Weights = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            bits = tensor.to(torch.bfloat16).view(torch.int16)
            weights[name] = bits.numpy().view(np.uint16)
    return weights


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """bf16, on the array's memory."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
