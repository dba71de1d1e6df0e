"""The Megatron-Core backend: one rank's part of a model that is cut in up to five dimensions.

Layers, pipeline schedules, gradient sums and parameter gathers are Megatron's. The optimizer is the
torch backend's, on this rank's slices (ZeRO-1): the same bf16 values of float32 masters, the same
clipping, whatever the layout. What must hold: scores, gradients and weights are those of the
Hugging Face model, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from transformers import AutoConfig

from leeway.config import TrainerConfig
from leeway.errors import ConfigError
from trainer_service.backends import files
from trainer_service.backends.base import Loss, StepResult
from trainer_service.backends.distributed import RankBackend, Round, rounds
from trainer_service.backends.exchange import Exchange
from trainer_service.backends.megatron import context
from trainer_service.backends.megatron.cpu import adapt
from trainer_service.backends.megatron.gradients import sum_parts
from trainer_service.backends.megatron.model import (
    PolicyModel,
    StageModel,
    heads_of,
    shape_of,
    transformer_config,
)
from trainer_service.backends.megatron.pieces import Pieces
from trainer_service.backends.megatron.pretrained import Pretrained
from trainer_service.backends.megatron.weights import NamedWeights
from trainer_service.backends.optimizer import MasterAdamW, dithered
from trainer_service.backends.snapshot import snapshot
from trainer_service.backends.world import World
from trainer_service.balance import Spread
from trainer_service.packed import Inputs


class MegatronBackend(RankBackend):
    """Implements `Backend`, on one of several ranks."""

    def __init__(
        self,
        model_directory: Path,
        config: TrainerConfig,
        *,
        precision: Literal["bf16", "fp32"] = "bf16",
        world: World,
        reference: Path | None = None,
        kind: type[StageModel] = PolicyModel,
    ) -> None:
        """Loads a Hugging Face model directory. All ranks construct it together.

        Args:
            precision: Of the weights that are computed with and published.
            reference: Model directory of the frozen reference; without one `scores` has none.
            kind: What scores tokens: `ValueModel` for a critic.

        Raises:
            ConfigError: The model is not mapped, or cannot be cut like this.
        """
        hf = AutoConfig.from_pretrained(model_directory)
        shape = shape_of(hf)
        world.layout.check(shape)
        if config.lora_rank:
            raise ConfigError(
                f"trainer.lora_rank = {config.lora_rank} with trainer.backend = megatron: adapters "
                "are the torch backend's; use trainer.backend=torch or trainer.lora_rank=0"
            )
        adapt()
        self._world = world
        self._precision = precision
        self._context_length = int(hf.max_position_embeddings)
        self._exchange = _join_groups(world)
        self._accumulated = False
        dtype = self._published if world.device.type == "cuda" else torch.float32
        megatron = transformer_config(hf, world.layout, config, dtype)
        self._model = kind(megatron, hf)
        self._parallel = DistributedDataParallel(
            megatron,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True, bucket_size=None
            ),
            self._model,
        )
        _sum_only_over_several(self._parallel)
        self._pieces = Pieces(self._parallel)
        self._weights = NamedWeights(self._model, self._pieces, heads_of(hf), world)
        pretrained = Pretrained(model_directory, shape.experts, kind.new_tensors(hf))

        def masters(name: str) -> Tensor:
            weights = pretrained.read(name)
            return dithered(name, weights) if precision == "bf16" else weights

        self._optimizer = MasterAdamW(
            {name: piece.working for name, piece in self._pieces.held.items()},
            self._weights.cut(masters),
            config,
            round_to_bf16=precision == "bf16",
            decayed=self._weights.decayed,
            group=dist.group.WORLD,
            copies=self._weights.copies,
        )
        self._parallel.start_param_sync(force_sync=True)
        self._reference = None if reference is None else self._frozen(reference, config, dtype, hf)

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def spread(self) -> Spread:
        return Spread(self._world.layout.dp, 1 / (6 * self._model.config.hidden_size))

    @torch.no_grad()
    def scores(
        self, batches: Sequence[Inputs], *, reference: bool = False
    ) -> list[npt.NDArray[np.float32]]:
        model = self._reference if reference else self._model
        if model is None:
            raise ConfigError("this backend was started without a reference model; give it one")
        found: list[Tensor] = []

        def keep(round_: Round, hidden: Tensor) -> Tensor:
            logprobs, _ = self._score(round_.own, hidden, model)
            found.extend(
                scores[0] for scores in self._exchange.gather(round_.sizes, logprobs[None])
            )
            return logprobs.sum()

        self._run(model, batches, keep, forward_only=True)
        return [logprobs.cpu().numpy() for logprobs in found[: len(batches)]]

    def accumulate(self, batches: Sequence[Inputs], loss: Loss | None) -> None:
        def total(round_: Round, hidden: Tensor) -> Tensor:
            logprobs, entropy = self._score(round_.own, hidden, self._model)
            return self._exchange.surrogate(round_.sizes, round_.all, loss, logprobs, entropy)

        self._run(self._parallel, batches, total, forward_only=False)
        self._accumulated = self._accumulated or len(batches) > 0

    def apply(self) -> StepResult:
        if not self._accumulated:
            return self._optimizer.step({})
        try:
            finalize_model_grads([self._parallel])
            result = self._optimizer.step(
                {name: piece.gradient for name, piece in self._pieces.held.items()}
            )
        finally:
            self._parallel.zero_grad_buffer()
            self._accumulated = False
        self._parallel.start_param_sync(force_sync=True)
        return result

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for name, values in self._weights.to_leader(self._published):
            if self._published is torch.bfloat16:
                yield name, values.view(torch.int16).numpy().view(np.uint16)
            else:
                yield name, values.numpy()

    @torch.no_grad()
    def snapshot(self) -> Callable[[Path], None]:
        ranks = self._world.size // self._world.layout.pp
        return snapshot(
            self._optimizer,
            self._weights.whole_pieces,
            world=self._world,
            own=dist.get_rank() % ranks,
            ranks=ranks,
        )

    def load(self, directory: Path) -> None:
        weights = files.TensorFiles(directory, files.WEIGHTS)
        optimizer = files.TensorFiles(directory, files.OPTIMIZER)
        for name in self._weights.names() ^ set(weights.names()):
            raise ConfigError(f"checkpoint: weight {name!r} is on one side only")
        state = {name: optimizer.read(name) for name in self._optimizer.counts()}
        for moment, _ in self._optimizer.moments():
            cut = self._weights.cut(lambda name: optimizer.read(f"{moment}.{name}"))  # noqa: B023
            state |= {f"{moment}.{name}": part for name, part in cut.items()}
        self._optimizer.restore(self._weights.cut(weights.read), state)
        self._parallel.start_param_sync(force_sync=True)

    def _frozen(
        self, directory: Path, config: TrainerConfig, dtype: torch.dtype, policy: Any
    ) -> PolicyModel:
        """A model to score with, in the values that a policy of this precision has."""
        hf = AutoConfig.from_pretrained(directory)
        shape, layout = shape_of(hf), self._world.layout
        layout.check(shape)
        if hf.vocab_size != policy.vocab_size:
            raise ConfigError(
                f"trainer.reference = {str(directory)!r}: it knows {hf.vocab_size} tokens, the "
                f"policy {policy.vocab_size}; use a model with the same tokenizer"
            )
        model = PolicyModel(transformer_config(hf, layout, config, dtype), hf)
        pretrained = Pretrained(directory, shape.experts)
        NamedWeights(model.requires_grad_(False), Pieces(), heads_of(hf), self._world).fill(
            lambda name: pretrained.read(name).to(self._published)
        )
        return model

    # Computing -----------------------------------------------------------------------------------

    def _run(
        self,
        model: torch.nn.Module,
        batches: Sequence[Inputs],
        finish: Callable[[Round, Tensor], Tensor],
        *,
        forward_only: bool,
    ) -> None:
        """Megatron's schedule; `finish` makes a scalar of the last stage's hidden states."""
        if not batches:
            return
        data = self._exchange.data
        todo = list(rounds(batches, data.size(), data.rank()))

        def forward(pending: Iterator[Round], _: Any) -> tuple[Tensor, Any]:
            round_ = next(pending)

            def end(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                # Tokens are counted in the weights of the loss.
                return finish(round_, hidden), torch.zeros((), dtype=torch.int), {}

            return self._forward(round_.own, model), end

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(todo),
            model=[model],
            num_microbatches=len(todo),
            seq_length=self._world.layout.row_multiple,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward(self, batch: Inputs, model: Any) -> Tensor:
        row = batch.filled(self._world.layout.row_multiple)
        part = self._part(row)
        own = set(part.own)
        segments = [[*segment, int(i in own)] for i, segment in enumerate(part.segments)]
        hidden: Tensor = model(
            self._tensor(row.token_ids[part.tokens]).unsqueeze(0),
            self._tensor(row.positions[part.tokens]).unsqueeze(0),
            torch.tensor(segments),
        )
        return hidden

    def _score(self, batch: Inputs, hidden: Tensor, model: StageModel) -> tuple[Tensor, Tensor]:
        """Scores and entropies, float32 [n], on every rank of the last stage."""
        part = self._part(batch.filled(self._world.layout.row_multiple))
        place = np.full(sum(segment.length for segment in part.segments), -1)
        place[part.tokens] = np.arange(part.tokens.size)
        rows = place[batch.rows]
        here = rows >= 0
        tokens = here[batch.predictions]
        scores = model.score(
            hidden,
            self._tensor(rows[here]),
            self._tensor(batch.temperatures[here]),
            self._tensor((np.cumsum(here) - 1)[batch.predictions[tokens]]),
            self._tensor(batch.targets[tokens]),
        )
        ranks = parallel_state.get_context_parallel_group()
        if ranks.size() == 1:
            return scores
        where = self._tensor(np.flatnonzero(tokens))
        blank = hidden.new_zeros(batch.targets.size, dtype=torch.float32)
        logprobs, entropy = (sum_parts(blank.index_put((where,), score), ranks) for score in scores)
        return logprobs, entropy

    def _part(self, row: Inputs) -> context.Part:
        ranks = parallel_state.get_context_parallel_group()
        return context.part(row.segments, ranks.size(), ranks.rank())

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._world.device)

    @property
    def _published(self) -> torch.dtype:
        return torch.bfloat16 if self._precision == "bf16" else torch.float32


def _join_groups(world: World) -> Exchange:
    """All ranks call it together; a process' models share Megatron's groups."""
    layout = world.layout
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
        )
        if world.device.type == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(0)
    scoring = dist.new_group(list(range(world.leader, world.size)))
    return Exchange(parallel_state.get_data_parallel_group(), scoring, world.leader)


def _sum_only_over_several(model: DistributedDataParallel) -> None:
    """A bucket of one data-parallel rank has nothing to sum or gather: gloo would copy all of it,
    there and back, for as long as an optimizer step takes."""
    for buckets in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
        if buckets.intra_distributed_optimizer_instance_size == 1:
            buckets.start_grad_sync = buckets.start_param_sync = _nothing


def _nothing(**_: Any) -> None: ...
