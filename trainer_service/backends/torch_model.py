"""A Hugging Face causal model that scores packed micro-batches.

What must hold: nothing is computed at positions that no trained token needs, and a model is refused
unless it scores packed segments as it scores each sequence alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.modeling_layers import GradientCheckpointingLayer

from leeway.config import TrainerConfig
from leeway.errors import ConfigError
from trainer_service.backends import lora, packed_attention
from trainer_service.backends.token_scores import token_scores
from trainer_service.packed import Inputs, Segment

_PROBE = Inputs(
    token_ids=np.array([1, 2, 3, 4, 6]),
    positions=np.array([0, 1, 2, 3, 3]),
    segments=(Segment(0, 3), Segment(3, 1, parent=0), Segment(4, 1, parent=0)),
    rows=np.array([2, 3, 4]),
    temperatures=np.ones(3, dtype=np.float32),
    predictions=np.array([0, 1, 0, 2]),
    targets=np.array([4, 5, 6, 7]),
)
"""The answers 4 5 and 6 7 behind the prompt 1 2 3."""


class TorchModel(nn.Module):
    """From a micro-batch to the scores of its trained tokens."""

    def __init__(self, directory: Path, config: TrainerConfig, device: torch.device) -> None:
        """Loads a model directory in float32.

        Raises:
            ConfigError: The model does something that packing or the scores cannot follow.
        """
        super().__init__()
        model = self._load(directory)
        if not model._supports_attention_backend:
            raise ConfigError(
                f"{type(model).__name__}: its attention does not go through transformers' "
                "AttentionInterface, so that packed sequences would see each other"
            )
        # No dropout; the gradient does not depend on the mode.
        model.eval()
        self.model = model.to(device)
        self._check_packing(device)
        if config.lora_rank:
            lora.add_adapters(model, config)
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in self.layers():
                layer.training = True

    @property
    def context_length(self) -> int:
        return int(self.model.config.max_position_embeddings)

    def layers(self) -> list[nn.Module]:
        """The decoder's."""
        return [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]

    def forward(self, batch: Inputs) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, float32 [n], of the trained tokens."""
        device = self.model.get_input_embeddings().weight.device

        def tensor(values: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(device)

        hidden = self.model.base_model(
            input_ids=tensor(batch.token_ids).unsqueeze(0),
            position_ids=tensor(batch.positions).unsqueeze(0),
            segments=batch.segments,
            use_cache=False,
        ).last_hidden_state[0]
        return self._score(
            hidden[tensor(batch.rows)],
            tensor(batch.temperatures),
            tensor(batch.predictions),
            tensor(batch.targets),
        )

    def _load(self, directory: Path) -> Any:
        # transformers' types are too narrow for what it accepts.
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=packed_attention.NAME
        )

    def _score(
        self, hidden: Tensor, temperatures: Tensor, predictions: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings().weight
        return token_scores(hidden, head, temperatures, predictions, targets)

    def _plain_scores(self, token_ids: Tensor) -> Tensor:
        """float32 [b, s - 1], of the tokens that follow each, by the model's own pass."""
        logits = self.model(input_ids=token_ids, use_cache=False).logits[:, :-1]
        scores: Tensor = logits.log_softmax(dim=-1).gather(2, token_ids[:, 1:, None])
        return scores.squeeze(2)

    @torch.no_grad()
    def _check_packing(self, device: torch.device) -> None:
        """Two answers packed behind one prompt must score as each does in the model's own pass.

        They do not if its layers mix tokens other than by attention, if its attention has extras,
        or if its head has a bias or scales the logits.
        """
        packed = self(_PROBE)[0].cpu().numpy()
        self.model.set_attn_implementation("eager")
        ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]], device=device)
        expected = self._plain_scores(ids)[:, 2:].flatten().cpu().numpy()
        self.model.set_attn_implementation(packed_attention.NAME)
        if not np.allclose(packed, expected, rtol=1e-3, atol=1e-3):
            raise ConfigError(
                f"{type(self.model).__name__} cannot be trained packed: it scores "
                f"{packed.tolist()} packed and {expected.tolist()} alone"
            )


class ValueModel(TorchModel):
    """The same with a head of one number: the value of the state before each trained token.

    What of such a head (transformers' `score`) a directory lacks is 0.
    """

    def __init__(self, directory: Path, config: TrainerConfig, device: torch.device) -> None:
        """
        Raises:
            ConfigError: As `TorchModel`, or transformers knows no token classifier of the family.
        """
        super().__init__(directory, config, device)
        # Only now: packing was checked with random ones.
        for name in self._new:
            nn.init.zeros_(self.model.get_parameter(name))

    def _load(self, directory: Path) -> Any:
        try:
            model, found = AutoModelForTokenClassification.from_pretrained(
                directory,
                num_labels=1,
                dtype=torch.float32,
                attn_implementation=packed_attention.NAME,
                output_loading_info=True,
            )
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"trainer.critic.model = {str(directory)!r}: it cannot have a head of one value: "
                f"{error}"
            ) from error
        self._new = [name for name in found["missing_keys"] if name.startswith("score.")]
        return model

    def _score(
        self, hidden: Tensor, temperatures: Tensor, predictions: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        values = self.model.score(hidden).float().squeeze(1)[predictions]
        return values, torch.zeros_like(values)

    def _plain_scores(self, token_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=token_ids, use_cache=False).logits
        return logits[:, :-1, 0]
