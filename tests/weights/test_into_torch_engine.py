"""The broadcast into the engine that Leeway brings along, canary included."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from support import DEADLINE, bf16, publisher
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.fleet import node
from leeway.deltas import Tensor
from rollout_service.engines.torch_engine import TorchEngine
from trainer_service.weight_broadcast import Canary


def _save_model(directory: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


async def test_the_torch_engine_holds_what_the_trainer_published(tmp_path: Path) -> None:
    directory = _save_model(tmp_path)
    engine = TorchEngine(directory, concurrency=2)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = np.arange(3, 12, dtype=np.int32)

    def policy() -> dict[str, Tensor]:
        return {n: bf16(p.detach().numpy().copy()) for n, p in model.named_parameters()}

    def canary() -> Canary:
        rounded = copy.deepcopy(model)
        tokens = torch.from_numpy(prompt.astype(np.int64))[None]
        with torch.no_grad():
            for parameter in rounded.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
            logprobs = rounded(tokens).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        return Canary(prompt, chosen, tolerance=1e-4)

    try:
        with publisher() as broadcast:
            async with node(broadcast.address, engine, policy()) as receiver:
                for version in range(3):
                    broadcast.publish(version, policy().items(), canary())
                    await receiver.wait_for(version, DEADLINE)
                    assert engine.version == version
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter += 3e-3 * torch.randn_like(parameter)
    finally:
        await engine.close()
