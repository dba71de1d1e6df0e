"""The model that the torch engine holds: loading it, and its forward pass.

Any Hugging Face causal LM with plain causal attention: the model's own modules run, only attention
is ours. Whether that holds is not assumed: when loaded, the model must agree with itself under its
own attention on a probe, or it is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from leeway.errors import EngineError
from leeway.trajectory import Float32Array
from rollout_service.engines.kv_cache import ATTENTION, CHUNK, KVCache, Span, StepPlan
from rollout_service.engines.torch_weights import ModelWeights

# Largest difference of a logit between our attention and the model's own, relative to the largest
# logit: float32 rounding stays under 1e-5, a missing feature (soft caps, sinks, state) far above.
PROBE_TOLERANCE = 1e-3
# A matrix product rounds a row otherwise when it, or a thread's part of it, has fewer rows left.
ROWS = 4


class HeldModel:
    """A causal LM. `forward` and `weights.write` share one thread.

    Attributes:
        weights: What it computes with.
    """

    def __init__(
        self, directory: Path, context: int | None = None, *, deterministic: bool = False
    ) -> None:
        """`deterministic`: a token's logits depend on nothing but the tokens before it and the way
        they came in: not on what else is in its step.

        Raises:
            EngineError: the directory holds no model that this engine can serve.
        """
        # A progress bar has no place in a service's log.
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            config = AutoConfig.from_pretrained(directory)
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation=ATTENTION
            )
        except (OSError, ValueError) as error:
            raise EngineError(f"{directory}: not a Hugging Face causal LM: {error}") from error
        self._model = model.eval().requires_grad_(False)
        text = config.get_text_config()
        self._layers = int(text.num_hidden_layers)
        self._kv_heads = int(getattr(text, "num_key_value_heads", text.num_attention_heads))
        head_dim = getattr(text, "head_dim", None)
        self._head_dim = int(head_dim or text.hidden_size // text.num_attention_heads)
        self.vocabulary_size = int(text.vocab_size)
        self.context_length = _context(text, context)
        self.stop_tokens = stop_tokens(directory)
        self.deterministic = deterministic
        self.weights = ModelWeights(self._model)
        self._prove(directory)

    def new_cache(self, slots: int) -> KVCache:
        chunk = 1 if self.deterministic else CHUNK
        return KVCache(self._layers, slots, self._kv_heads, self._head_dim, chunk=chunk)

    def forward(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        plan: StepPlan,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Logits, float32 [rows, vocabulary], of the given packed tokens (None: of all).

        `tokens` and `positions` are int64 [packed tokens].
        """
        wanted = (tokens if rows is None else rows).size
        if self.deterministic:
            filled = _filled(tokens)
            if filled.size > tokens.size:
                plan = replace(plan, spans=(*plan.spans, unkept(tokens.size, filled.size)))
            tokens, positions = filled, _filled(positions)
            rows = _filled(rows) if rows is not None else None
        logits: Tensor = self._model(
            input_ids=torch.from_numpy(tokens)[None],
            position_ids=torch.from_numpy(positions)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(rows) if rows is not None else 0,
            leeway_plan=plan,
        ).logits
        return logits[0, :wanted]

    def logprobs(self, tokens: npt.NDArray[np.int64]) -> Float32Array:
        """float32 [n - 1]: log-probability of each token after the first, at temperature 1."""
        plan = self.new_cache(slots=0).plan(np.empty(0, np.int64), [unkept(0, tokens.size)])
        logits = self.forward(tokens, np.arange(tokens.size), plan)
        return chosen_logprobs(logits[:-1], tokens)

    def _prove(self, directory: Path) -> None:
        """Compares prefill and decode through our attention with the model's own."""
        tokens = (np.arange(9) * 7919 + 1) % self.vocabulary_size
        with torch.inference_mode():
            cache = self.new_cache(slots=1)
            cache.reserve(tokens.size, 0)
            first = cache.plan(np.empty(0, np.int64), [Span(0, 6, slice(0, 1))])
            parts = [self.forward(tokens[:6], np.arange(6), first)]
            for length in range(7, tokens.size + 1):
                step = cache.plan(np.array([length]), [])
                last = slice(length - 1, length)
                parts.append(self.forward(tokens[last], np.arange(length)[last], step))
            ours = torch.cat(parts)
            self._model.set_attn_implementation("eager")
            own = self._model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]
            self._model.set_attn_implementation(ATTENTION)
        difference = float((ours - own).abs().max() / own.abs().max())
        if not difference <= PROBE_TOLERANCE:
            raise EngineError(
                f"{directory}: logits differ by {difference:.1e} from the model's own attention; "
                "the torch engine serves plain causal attention only, use SGLang or vLLM"
            )


def unkept(start: int, stop: int) -> Span:
    """Packed tokens that are computed, and leave nothing in the cache."""
    return Span(start, stop, slice(0, 0))


def _filled(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Zeros behind the values, to a multiple of `ROWS`."""
    return np.pad(values, (0, -values.size % ROWS))


def chosen_logprobs(logits: Tensor, tokens: npt.NDArray[np.int64]) -> Float32Array:
    """float32 [n - 1]: of int64 [n] `tokens` after the first, given the logits [n - 1] before."""
    chosen = logits.gather(1, torch.from_numpy(tokens[1:, None]))[:, 0]
    result: Float32Array = (chosen - logits.logsumexp(-1)).numpy()
    return result


def _context(config: Any, wanted: int | None) -> int:
    """The longest sequence: what the model allows, and no further than its attention window."""
    limit = int(config.max_position_embeddings)
    layer_types = getattr(config, "layer_types", None)
    slides = layer_types is None or "sliding_attention" in layer_types
    window = getattr(config, "sliding_window", None)
    if slides and window is not None:
        limit = min(limit, int(window))
    if wanted is not None and wanted > limit:
        raise EngineError(f"model.context = {wanted}: the model allows at most {limit} tokens")
    return wanted or limit


def stop_tokens(directory: Path) -> frozenset[int]:
    """Ids that end an answer, as the model directory says."""
    try:
        found = GenerationConfig.from_pretrained(directory).eos_token_id
    except OSError:
        found = AutoConfig.from_pretrained(directory).get_text_config().eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found) if isinstance(found, list) else frozenset([int(found)])
