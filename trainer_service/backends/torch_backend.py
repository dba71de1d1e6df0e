"""The PyTorch backend: any Hugging Face causal language model, on one device or many (FSDP2).

Master weights are float32. The forward pass uses their bf16 values, in float32 arithmetic on a CPU
and in bf16 elsewhere: the same numbers as are published. On several ranks weights, gradients and
optimizer are cut over all of them, layer by layer, and each computes other micro-batches. What must
hold: the same batches on the same ranks give bitwise the same weights; on others the same but for
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from leeway.config import TrainerConfig
from leeway.errors import ConfigError
from trainer_service.backends import files, lora
from trainer_service.backends.base import Loss, StepResult
from trainer_service.backends.distributed import RankBackend, Round, rounds
from trainer_service.backends.exchange import Exchange
from trainer_service.backends.optimizer import MasterAdamW, dithered
from trainer_service.backends.sharding import Shards, local
from trainer_service.backends.snapshot import snapshot
from trainer_service.backends.torch_model import TorchModel
from trainer_service.backends.world import World
from trainer_service.balance import Spread
from trainer_service.packed import Inputs, PackedBatch


class TorchBackend(RankBackend):
    """Implements `Backend`."""

    def __init__(
        self,
        model_directory: Path,
        config: TrainerConfig,
        *,
        precision: Literal["bf16", "fp32"] = "bf16",
        world: World | None = None,
        reference: Path | None = None,
        kind: type[TorchModel] = TorchModel,
    ) -> None:
        """Loads a Hugging Face model directory.

        Args:
            precision: Of the weights that are computed with and published.
            world: The ranks over which the model is cut; all construct it together.
            reference: Model directory of the frozen reference; without one `scores` has none.
            kind: What scores tokens: `ValueModel` for a critic.

        Raises:
            ConfigError: The model does something that packing or the scores cannot follow.
        """
        self._config = config
        self._precision = precision
        self._world = world
        self._shards: Shards | None = None
        self._exchange: Exchange | None = None
        on_gpu = torch.cuda.is_available()
        compute = torch.bfloat16 if on_gpu and precision == "bf16" else torch.float32
        if world is None:
            device = torch.device("cuda" if on_gpu else "cpu")
            self._scores = kind(model_directory, config, device)
            masters = self._masters()
            self._reference = self._frozen(reference, device)
            if device.type == "cpu":
                _make_sparse(self._scores.model)
            else:
                self._scores.to(compute)
                if self._reference is not None:
                    self._reference.to(compute)
        else:
            everyone = dist.group.WORLD
            assert everyone is not None
            self._exchange = Exchange(everyone, everyone, world.leader)
            with world.in_turn():
                self._scores = kind(model_directory, config, world.device)
                masters = self._masters()
                self._reference = self._frozen(reference, world.device)
                self._shards = self._cut(self._scores, world, compute)
                if self._reference is not None:
                    self._cut(self._reference, world, compute)
                masters = {name: self._part(m).clone() for name, m in masters.items()}
        self._optimizer = MasterAdamW(
            {name: local(parameter).detach() for name, parameter in self._trained()},
            masters,
            config,
            round_to_bf16=precision == "bf16",
            decayed={name for name, parameter in self._trained() if parameter.ndim > 1},
            group=None if self._exchange is None else self._exchange.data,
        )

    @property
    def context_length(self) -> int:
        return self._scores.context_length

    @property
    def spread(self) -> Spread:
        ranks = 1 if self._world is None else self._world.size
        return Spread(ranks, 1 / (6 * self._scores.model.config.hidden_size))

    @torch.no_grad()
    def scores(
        self, batches: Sequence[Inputs], *, reference: bool = False
    ) -> list[npt.NDArray[np.float32]]:
        scores = self._reference if reference else self._scores
        if scores is None:
            raise ConfigError("this backend was started without a reference model; give it one")
        found: list[Tensor] = []
        for batch, sizes, _ in self._rounds(batches):
            logprobs, _ = scores(batch)
            if self._exchange is None:
                found.append(logprobs)
            else:
                found += (own[0] for own in self._exchange.gather(sizes, logprobs[None]))
        if self._shards is not None:
            self._shards.reshard()
        return [logprobs.cpu().numpy() for logprobs in found[: len(batches)]]

    def accumulate(self, batches: Sequence[Inputs], loss: Loss | None) -> None:
        for batch, sizes, at_a_time in self._rounds(batches):
            logprobs, entropy = self._scores(batch)
            if self._exchange is None:
                assert loss is not None and isinstance(batch, PackedBatch)
                total = loss(batch, logprobs, entropy)
            else:
                total = self._exchange.surrogate(sizes, at_a_time, loss, logprobs, entropy)
            torch.autograd.backward(total)

    def apply(self) -> StepResult:
        gradients = {}
        for name, parameter in self._trained():
            if parameter.grad is not None:
                gradients[name] = _dense(local(parameter.grad))
                parameter.grad = None
        return self._optimizer.step(gradients)

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        def whole(name: str, parameter: Tensor) -> Tensor:
            return self._whole(name, local(parameter))

        config = self._config
        alone = config.lora_rank and config.lora_publish == "adapters"
        named = lora.separate if alone else lora.merged
        for name, values in named(self._scores.model, whole, config.lora_alpha):
            if self._precision == "bf16":
                bits = values.to(torch.bfloat16).view(torch.int16)
                yield name, bits.cpu().numpy().view(np.uint16)
            else:
                yield name, values.cpu().numpy()

    @torch.no_grad()
    def snapshot(self) -> Callable[[Path], None]:
        own = 0 if self._world is None else self._world.rank
        return snapshot(
            self._optimizer,
            lambda parts: ((name, self._whole(name, part)) for name, part in parts.items()),
            world=self._world,
            own=own,
            ranks=self.spread.ranks,
        )

    def load(self, directory: Path) -> None:
        def parts(stem: str) -> dict[str, Tensor]:
            found = files.TensorFiles(directory, stem)
            return {name: self._part(found.read(name)) for name in found.names()}

        self._optimizer.restore(parts(files.WEIGHTS), parts(files.OPTIMIZER))

    def _rounds(self, batches: Sequence[Inputs]) -> Iterator[Round]:
        own = 0 if self._exchange is None else self._exchange.data.rank()
        return rounds(batches, self.spread.ranks, own)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((n, p) for n, p in self._scores.model.named_parameters() if p.requires_grad)

    @torch.no_grad()
    def _masters(self) -> dict[str, Tensor]:
        """Of the whole model; what is frozen is rounded."""
        rounded = self._precision == "bf16"
        for parameter in self._scores.model.parameters():
            if rounded and not parameter.requires_grad:
                parameter.copy_(parameter.bfloat16())
        return {
            name: dithered(name, p) if rounded else p.detach().clone()
            for name, p in self._trained()
        }

    @torch.no_grad()
    def _frozen(self, directory: Path | None, device: torch.device) -> TorchModel | None:
        """A model to score with, in the values that a policy of this precision has."""
        if directory is None:
            return None
        plain = self._config.model_copy(update={"lora_rank": 0, "activation_checkpointing": False})
        scores = TorchModel(directory, plain, device)
        own, other = (m.model.config.vocab_size for m in (self._scores, scores))
        if own != other:
            raise ConfigError(
                f"trainer.reference = {str(directory)!r}: it knows {other} tokens, the policy "
                f"{own}; use a model with the same tokenizer"
            )
        for parameter in scores.parameters():
            parameter.requires_grad = False
            if self._precision == "bf16":
                parameter.copy_(parameter.bfloat16())
        return scores

    def _cut(self, scores: TorchModel, world: World, compute: torch.dtype) -> Shards:
        offload = self._config.cpu_offload and torch.cuda.is_available()
        return Shards(scores, world.device, compute, offload=offload)

    def _part(self, whole: Tensor) -> Tensor:
        return whole if self._shards is None or not whole.ndim else self._shards.part(whole)

    def _whole(self, name: str, part: Tensor) -> Tensor:
        return part if self._shards is None else self._shards.whole(name, part)


def _make_sparse(model: Any) -> None:
    """The embedding's gradient gets a row for each token, not for each word of the vocabulary."""
    embedding = model.get_input_embeddings()
    if type(embedding) is nn.Embedding:
        embedding.sparse = True


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
