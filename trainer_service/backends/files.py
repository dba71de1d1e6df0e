"""The files that hold weights: whole tensors by Hugging Face name, however the model is cut.

A backend writes `weights*.safetensors`, the float32 masters, and `optimizer*.safetensors`, their
moments and the counts; each rank may write a file of its own with tensors that no other has. So any
layout of any backend reads what any other wrote. A model directory holds `*.safetensors` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from leeway.errors import ConfigError

WEIGHTS = "weights"
OPTIMIZER = "optimizer"
WHOLE = ""
"""The file's part when one process writes everything."""


def write(
    directory: Path, part: str, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Writes one part: CPU tensors, `state` named "first.NAME" and the like."""
    save_file(dict(weights), directory / f"{WEIGHTS}{part}.safetensors")
    save_file(dict(state), directory / f"{OPTIMIZER}{part}.safetensors")


class TensorFiles:
    """Reads whole tensors by name from all parts."""

    def __init__(self, directory: Path, stem: str = "") -> None:
        """Opens `stem*.safetensors`.

        Raises:
            ConfigError: There is none.
        """
        paths = sorted(directory.glob(f"{stem}*.safetensors"))
        if not paths:
            raise ConfigError(f"{directory}: holds no {stem}*.safetensors")
        self._directory = directory
        self._files: dict[str, Any] = {}
        for path in paths:
            file: Any = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str) -> Tensor:
        """
        Raises:
            ConfigError: No part holds it.
        """
        if name not in self._files:
            raise ConfigError(f"{self._directory}: tensor {name!r} is missing: of another model?")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor
