"""Random models of a few thousand weights, as Hugging Face directories, and what they compute.

With a tokenizer of characters, which constrained answers need. It has no white space, of which a
random model may write any amount between the parts of a JSON text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 300
EOS = 7
CONTEXT = 256

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "initializer_range": 0.2,
}

CONFIGS = {
    # Heads of 32: vLLM has no smaller ones on CPUs.
    "llama": LlamaConfig(**_SHAPE, head_dim=32, tie_word_embeddings=True),
    "llama_untied": LlamaConfig(**_SHAPE, head_dim=32, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=24, tie_word_embeddings=True),
}


def save_tiny_model(directory: Path, family: str = "llama", seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def tokenizer() -> PreTrainedTokenizerFast:
    named = {0: "<unk>", 1: "<bos>", EOS: "<eos>"}
    others = iter([*map(chr, range(33, 127)), *(f"({number})" for number in range(VOCABULARY))])
    vocabulary = {named.get(index) or next(others): index for index in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return fast


def weights_of(directory: Path) -> dict[str, npt.NDArray[np.uint16]]:
    """bf16 as uint16, by Hugging Face name."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return {
        name: tensor.detach().view(torch.int16).numpy().view(np.uint16)
        for name, tensor in model.named_parameters()
    }


def plain_logprobs(
    directory: Path, tokens: npt.NDArray[Any], temperature: float = 1.0
) -> npt.NDArray[np.float32]:
    """float32 [n, vocabulary]: log-probabilities that plain transformers gives after each token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return (logits / temperature).log_softmax(-1).numpy()
