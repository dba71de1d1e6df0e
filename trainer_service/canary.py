"""The canary that travels with every policy: a fixed text, and how likely the policy finds it.

Computed by the backend's own forward pass, right before its weights are read, from the very values
that are published. A node whose engine disagrees does not hold these weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from leeway.config import WeightsConfig
from leeway.errors import ConfigError
from leeway.manifests import Canary
from trainer_service.backends.base import Backend
from trainer_service.packed import Int64Array, PackedBatch, Segment

TEXT = (
    "The quick brown fox jumps over the lazy dog, rests in the shade of an old tree by the river, "
    "and counts: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10."
)


class CanaryText:
    """The text's first tokens, ready to be scored.

    Attributes:
        token_ids: int64 [n].
    """

    def __init__(self, model_directory: Path, config: WeightsConfig) -> None:
        """Raises ConfigError when the model's tokenizer makes less than two tokens of the text."""
        tokenizer = AutoTokenizer.from_pretrained(model_directory)
        found = tokenizer(TEXT, add_special_tokens=False)["input_ids"][: config.canary_tokens]
        if len(found) < 2:
            raise ConfigError(f"{model_directory}: its tokenizer makes {found} of {TEXT!r}")
        self.token_ids = np.array(found, dtype=np.int64)
        self._batch = scored_whole(self.token_ids)
        self._tolerance = config.canary_tolerance

    def score(self, backend: Backend) -> Canary:
        """Under the weights that the backend holds now."""
        (logprobs,) = backend.scores([self._batch])
        return Canary(self.token_ids.astype(np.int32), logprobs, self._tolerance)


def scored_whole(token_ids: Int64Array) -> PackedBatch:
    """One sequence, every token after the first to be scored at temperature 1."""
    count = token_ids.size - 1
    zeros = np.zeros(count, dtype=np.float32)
    return PackedBatch(
        token_ids=token_ids[:-1],
        positions=np.arange(count),
        segments=(Segment(0, count),),
        rows=np.arange(count),
        temperatures=np.ones(count, dtype=np.float32),
        predictions=np.arange(count),
        targets=token_ids[1:],
        behaviour=zeros,
        advantages=zeros,
        weights=zeros,
        versions=np.zeros(count, dtype=np.int64),
        sequences=np.zeros(count, dtype=np.int64),
    )
