"""The PyTorch backend: any Hugging Face causal language model on one device.

Master weights are float32. The forward pass uses their bf16 values, in float32 arithmetic on a CPU
and in bf16 elsewhere: the same numbers as are published. What must hold: the same batches give
bitwise the same weights; nothing is computed at positions that no trained token needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from leeway.config import TrainerConfig
from leeway.errors import ConfigError
from trainer_service.backends import packed_attention
from trainer_service.backends.allocator import keep_freed_memory
from trainer_service.backends.base import Backend, Loss, StepResult
from trainer_service.backends.optimizer import MasterAdamW
from trainer_service.backends.token_scores import token_scores
from trainer_service.batching import PackedBatch, Segment

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


class TorchBackend(Backend):
    """Implements `Backend`."""

    def __init__(
        self,
        model_directory: Path,
        config: TrainerConfig,
        *,
        precision: Literal["bf16", "fp32"] = "bf16",
        device: str = "cpu",
    ) -> None:
        """Loads a Hugging Face model directory.

        Args:
            precision: Of the weights that are computed with and published.

        Raises:
            ConfigError: The model does something that packing or the scores cannot follow.
        """
        self._precision = precision
        self._device = torch.device(device)
        if self._device.type == "cpu":
            keep_freed_memory()
        self._model = _load(model_directory)
        if not self._model._supports_attention_backend:
            raise ConfigError(
                f"{type(self._model).__name__}: its attention does not go through transformers' "
                "AttentionInterface, so that packed sequences would see each other"
            )
        # No dropout; the gradient does not depend on the mode.
        self._model.eval()
        embedding = self._model.get_input_embeddings()
        if type(embedding) is torch.nn.Embedding:
            # Its gradient has a row for each token, not for each word of the vocabulary.
            embedding.sparse = True
        self._model.to(self._device)
        self._check_packing()
        self._optimizer = MasterAdamW(
            dict(self._model.named_parameters()), config, round_to_bf16=precision == "bf16"
        )
        if precision == "bf16" and self._device.type != "cpu":
            self._model.to(torch.bfloat16)

    @property
    def context_length(self) -> int:
        return int(self._model.config.max_position_embeddings)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> npt.NDArray[np.float32]:
        logprobs, _ = self._score(batch)
        return logprobs.cpu().numpy()

    def accumulate(self, batches: Sequence[PackedBatch], loss: Loss) -> None:
        for batch in batches:
            logprobs, entropy = self._score(batch)
            torch.autograd.backward(loss(batch, logprobs, entropy))

    def apply(self) -> StepResult:
        return self._optimizer.step()

    def weights(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for name, parameter in self._model.named_parameters():
            values = parameter.detach()
            if self._precision == "bf16":
                yield (
                    name,
                    values.to(torch.bfloat16).view(torch.int16).cpu().numpy().view(np.uint16),
                )
            else:
                yield name, values.cpu().numpy()

    def save(self, directory: Path) -> None:
        save_file(dict(self._optimizer.masters()), directory / WEIGHTS_FILE)
        save_file(dict(self._optimizer.state()), directory / OPTIMIZER_FILE)

    def load(self, directory: Path) -> None:
        self._optimizer.restore(
            load_file(directory / WEIGHTS_FILE), load_file(directory / OPTIMIZER_FILE)
        )

    def _score(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, float32 [n], of a batch's trained tokens."""
        hidden = self._model.base_model(
            input_ids=self._tensor(batch.token_ids).unsqueeze(0),
            position_ids=self._tensor(batch.positions).unsqueeze(0),
            segments=batch.segments,
            use_cache=False,
        ).last_hidden_state[0]
        return token_scores(
            hidden[self._tensor(batch.rows)],
            self._model.get_output_embeddings().weight,
            self._tensor(batch.temperatures),
            self._tensor(batch.predictions),
            self._tensor(batch.targets),
        )

    @torch.no_grad()
    def _check_packing(self) -> None:
        """Two answers packed behind one prompt must score as each does in the model's own pass.

        They do not if its layers mix tokens other than by attention, if its attention has extras,
        or if its head has a bias or scales the logits.
        """
        prompt, answers = [1, 2, 3], ([4, 5], [6, 7])
        rows, predictions = np.array([2, 3, 4]), np.array([0, 1, 0, 2])
        count = len(predictions)
        packed = self.logprobs(
            PackedBatch(
                token_ids=np.array([1, 2, 3, 4, 6]),
                positions=np.array([0, 1, 2, 3, 3]),
                segments=(Segment(0, 3), Segment(3, 1, parent=0), Segment(4, 1, parent=0)),
                rows=rows,
                temperatures=np.ones(len(rows), dtype=np.float32),
                predictions=predictions,
                targets=np.array([4, 5, 6, 7]),
                behaviour=np.zeros(count, dtype=np.float32),
                advantages=np.zeros(count, dtype=np.float32),
                weights=np.zeros(count, dtype=np.float32),
                versions=np.zeros(count, dtype=np.int64),
                sequences=np.array([0, 0, 1, 1]),
            )
        )
        self._model.set_attn_implementation("eager")
        ids = torch.tensor([prompt + answer for answer in answers], device=self._device)
        own = self._model(input_ids=ids, use_cache=False).logits.log_softmax(dim=-1)
        self._model.set_attn_implementation(packed_attention.NAME)
        expected = own[:, 2:4].gather(2, ids[:, 3:, None]).flatten().cpu().numpy()
        if not np.allclose(packed, expected, rtol=1e-3, atol=1e-3):
            raise ConfigError(
                f"{type(self._model).__name__} cannot be trained packed: it scores "
                f"{packed.tolist()} packed and {expected.tolist()} alone"
            )

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _load(directory: Path) -> Any:
    """The model, its attention replaced. transformers' types are too narrow for what it accepts."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=packed_attention.NAME
    )
