"""A cut model's weights by Hugging Face's names: cut whole tensors, and make them whole again.

What must hold: ranks go through tensors in the same order, since each is gathered by all of its
pipeline stage.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from trainer_service.backends.megatron import names
from trainer_service.backends.megatron.model import StageModel
from trainer_service.backends.megatron.pieces import Pieces
from trainer_service.backends.world import World

_LIST_SECONDS = 600.0
_numbers = itertools.count()
"""Of this process's models; all ranks count alike."""


class NamedWeights:
    """One model on this rank.

    Attributes:
        held: Names of the parameters of which this rank's optimizer holds a piece.
        copies: Those that another rank counts: what is not cut, and a tied head's.
        decayed: Those that are matrices.
    """

    def __init__(self, model: StageModel, pieces: Pieces, heads: names.Heads, world: World) -> None:
        """All ranks construct it together.

        Raises:
            ConfigError: The map does not know a parameter.
        """
        self._parameters = dict(model.named_parameters())
        self._pieces = pieces
        self._heads = heads
        self._world = world
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._expert_group = parallel_state.get_expert_model_parallel_group()
        tied = model.share_embeddings_and_output_weights
        self._sources = {
            name: names.source(name, model.first_layer, tied=tied) for name in self._parameters
        }
        self._experts = 1 + max((s.expert for s in self._sources.values()), default=0)
        self._tied_head = {"head.weight"} if tied else set[str]()
        self.held = list(pieces.held)
        self.decayed = {name for name in self.held if self._parameters[name].ndim > 1}
        self.copies = {name for name in self.held if self._is_copy(name)}
        self._listing = self._list_tensors()

    def parameter(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """A parameter of this rank, of whole tensors by Hugging Face name."""
        source, group = self._sources[name], self._tensor_group
        tensors = [read(tensor) for tensor in source.names]
        if source.join is names.Join.EXPERT:
            tensors = [tensors[0][self._expert_group.rank() * self._experts + source.expert]]
        return names.join(source, tensors, self._heads, group.size(), group.rank())

    def cut(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """This rank's pieces, float32 by parameter, of whole tensors by Hugging Face name."""
        cached = _LastRead(read)
        cut = {}
        for name, piece in self._pieces.held.items():
            flat = self.parameter(name, cached).reshape(-1)[piece.start : piece.end]
            cut[name] = flat.to(self._world.device, torch.float32, copy=True)
        return cut

    def fill(self, read: Callable[[str], Tensor]) -> None:
        """Sets all parameters of this rank."""
        cached = _LastRead(read)
        for name, parameter in self._parameters.items():
            parameter.detach().copy_(self.parameter(name, cached))

    def whole_pieces(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, float32 tensor) of the stage's tensors, on all its ranks, of the
        pieces that its ranks hold."""
        return self._wholes(
            lambda name: self._pieces.whole(name, self._parameters[name].shape, parts)
        )

    def to_leader(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of the whole model's tensors, on the leader, on its CPU."""
        world = self._world
        own = self._wholes(lambda name: self._parameters[name].detach())
        stage = parallel_state.get_pipeline_model_parallel_rank()
        for number, listing in enumerate(self._listing):
            first = number * (world.size // world.layout.pp)
            for name, shape in listing.items():
                whole = next(own)[1].to(dtype) if number == stage else None
                if first != world.leader:
                    whole = self._send(whole, first, shape, dtype)
                if world.leads:
                    assert whole is not None
                    yield name, whole.cpu()

    def names(self) -> set[str]:
        """Hugging Face's, of the whole model."""
        return {name for listing in self._listing for name in listing}

    def _is_copy(self, name: str) -> bool:
        cut = self._sources[name].join is not names.Join.COPY
        return name in self._tied_head or (not cut and self._tensor_group.rank() > 0)

    def _wholes(self, local: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """
        Args:
            local: Of a parameter's name: values on this rank, of the parameter's shape.
        """
        stacks: dict[str, list[Tensor]] = {}
        for name, source in self._sources.items():
            if name in self._tied_head:
                continue
            own = local(name)
            if source.join is names.Join.EXPERT:
                stacks.setdefault(source.names[0], []).append(own)
                continue
            whole = source.join is names.Join.COPY
            parts = [own] if whole else _gathered(own, self._tensor_group)
            yield from zip(source.names, names.split(source, parts, self._heads), strict=True)
        for name, experts in stacks.items():
            yield name, torch.cat(_gathered(torch.stack(experts), self._expert_group))

    def _send(
        self, whole: Tensor | None, first: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """From a stage's first rank to the leader."""
        if dist.get_rank() == first:
            assert whole is not None
            dist.send(whole.contiguous().view(torch.uint8), self._world.leader)
        if not self._world.leads:
            return None
        received = torch.empty(tuple(shape), dtype=dtype, device=self._world.device)
        dist.recv(received.view(torch.uint8), first)
        return received

    @torch.no_grad()
    def _list_tensors(self) -> list[dict[str, tuple[int, ...]]]:
        """For each stage its tensors' names and shapes, in the order of `_wholes`."""
        own = {
            name: tuple(tensor.shape)
            for name, tensor in self._wholes(lambda name: self._parameters[name].detach())
        }
        key = f"tensors/{next(_numbers)}"
        self._world.note(f"{key}/{dist.get_rank()}", json.dumps(own))
        stages = self._world.layout.pp
        ranks = [stage * (self._world.size // stages) for stage in range(stages)]
        told = self._world.read(
            [f"{key}/{rank}" for rank in ranks],
            "the pipeline stages' lists of tensors",
            _LIST_SECONDS,
        )
        return [{name: tuple(shape) for name, shape in json.loads(text).items()} for text in told]


class _LastRead:
    """Reads a tensor once when several parameters in a row are made of it."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        self._read = read
        self._last: tuple[str, Tensor] | None = None

    def __call__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, self._read(name))
        return self._last[1]


def _gathered(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """All ranks' tensors of one shape."""
    if group.size() == 1:
        return [own]
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return parts
