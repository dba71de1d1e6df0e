"""A tiny language model that calls a tool: what the gateway's tests run on.

It is a Llama of 64 x 2 with a character tokenizer, taught within seconds to answer `add 3 4` with a
call of `add`, `add 3 4 and 2 5` with two parallel calls, and a tool's result with "It is 7.".
Anything else it answers with whatever comes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests import tiny

CONTEXT = 640
STEPS = 240
_SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<unk>"]
# Whole words besides characters: so a text has several tokenisations, and the model may sample
# another than the tokenizer's.
_MARKS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "',
    '", "arguments": {"a": ',
    ', "b": ',
    "assistant\n",
    "system\n",
    "user\n",
    "tool\n",
    "tools\n",
    "add",
    " and ",
    "It is ",
]
_CHARACTERS = ["\n", *map(chr, range(32, 127))]
_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }} "
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The sums that it knows.
SUMS = [(3, 4), (2, 5), (1, 6), (2, 2)]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(_SPECIAL + _MARKS + _CHARACTERS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_tokens([AddedToken(mark, normalized=False) for mark in _MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = _TEMPLATE
    return fast


def call_text(a: int, b: int) -> str:
    arguments = json.dumps({"a": a, "b": b})
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


def build(directory: Path, *, trained: bool = True, seed: int = 0) -> Path:
    """Writes a Hugging Face model directory with bf16 values."""
    directory.mkdir(parents=True, exist_ok=True)
    fast = tokenizer()
    fast.save_pretrained(directory)
    model = tiny.llama(fast, context=CONTEXT, seed=seed)
    if trained:
        _teach(model, fast, random.Random(seed))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def _teach(model: LlamaForCausalLM, fast: PreTrainedTokenizerFast, rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    for _ in range(STEPS):
        rows = [_episode(fast, rng) for _ in range(8)]
        length = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), length), fast.pad_token_id)
        labels = torch.full((len(rows), length), -100)
        for row, (tokens, mask) in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            picked = [t if m else -100 for t, m in zip(tokens, mask, strict=True)]
            labels[row, : len(tokens)] = torch.tensor(picked)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _episode(fast: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens of a conversation, and which of them the assistant says."""
    sums = rng.sample(SUMS, rng.choice([1, 1, 2]))
    noise = "".join(rng.choice("abcdefgh ijklm.nopqr") for _ in range(rng.randrange(60)))
    system: list[dict[str, Any]] = [{"role": "system", "content": noise}] if noise else []
    question = "add " + " and ".join(f"{a} {b}" for a, b in sums)
    results = [{"role": "tool", "content": str(a + b)} for a, b in sums]
    said = ["".join(call_text(a, b) for a, b in sums)]
    said.append("It is " + " and ".join(str(a + b) for a, b in sums) + ".")
    turns = [[*system, {"role": "user", "content": question}], results]
    tokens: list[int] = []
    mask: list[int] = []
    for messages, answer in zip(turns, said, strict=True):
        tools = [{"type": "function", "function": {"name": "add"}}] if not tokens else None
        prompt = fast.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        prompt = ("\n" if tokens else "") + prompt
        for text, trained in ((prompt, 0), (answer + "<|im_end|>", 1)):
            ids = fast.encode(text, add_special_tokens=False)
            tokens += ids
            mask += [trained] * len(ids)
    return tokens, mask
