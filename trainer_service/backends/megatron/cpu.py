"""What Megatron-Core 0.16 needs to run where there is no CUDA, and what is wrong without TE.

Megatron asks `torch.cuda` for devices, streams and random states. Without a GPU those questions
only raise: answering them changes nothing for code that works. Nothing here draws random numbers:
there is no dropout, and weights come from files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch


class _Stream:
    """The one order in which a CPU does things; events of it have always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = None  # type: ignore[assignment]

    def record_event(self, *_: Any) -> _Stream:
        return self

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _WeightGradients:
    """In place of Apex' kernel: a matrix' gradient is added where Megatron sums it."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, gradients: torch.Tensor, total: Any) -> None:
        total.addmm_(gradients.t(), inputs)


class _CpuTorch(ModuleType):
    """torch, whose `zeros` on "cuda" are on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **{**kwargs, "device": "cpu"})


@contextmanager
def _on(_: Any) -> Iterator[None]:
    yield


def adapt() -> None:
    """Once a process; does only what the machine needs."""
    from megatron.core.transformer.moe import moe_utils

    # Bound only where Transformer Engine is importable, but read everywhere.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not torch.cuda.is_available():
        _answer_for_cuda()


def _answer_for_cuda() -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import token_dispatcher

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    # Classes: transformers annotates with them.
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.stream = _on
    schedules.torch = _CpuTorch("torch")
    layers.fused_weight_gradient_mlp_cuda = _WeightGradients
    layers._grad_accum_fusion_available = True
    random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    # Split sizes of an all-to-all: numpy is made of CUDA tensors only.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
