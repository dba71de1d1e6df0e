"""A tiny language model with a character tokenizer, for tests that run for real."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<system>", "<user>", "<assistant>"]
CHARACTERS = list(string.ascii_lowercase + string.digits + " +-*=?.,:")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build(directory: Path, *, context: int = 256, seed: int = 0) -> Path:
    """Writes a Hugging Face model directory: 2 layers of 64, bf16 values, random weights."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="?",
        additional_special_tokens=SPECIAL[2:],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    llama(fast, context=context, seed=seed).to(torch.bfloat16).save_pretrained(directory)
    return directory


def llama(tokenizer: PreTrainedTokenizerFast, *, context: int, seed: int) -> LlamaForCausalLM:
    """2 layers of 64 for a tokenizer's vocabulary, with random float32 weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.1,
        )
    )
