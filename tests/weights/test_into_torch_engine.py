"""The broadcast into the engine that Leeway brings along, canary included."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.fleet import node
from leeway.manifests import Canary
from leeway.tensors import Tensor
from rollout_service.engines.torch_engine import TorchEngine
from tests import tiny
from tests.weights.support import DEADLINE, bf16, publisher

PROMPT = np.arange(3, 12, dtype=np.int32)


async def test_the_torch_engine_holds_what_the_trainer_published(tmp_path: Path) -> None:
    directory = tiny.build(tmp_path / "model")
    engine = TorchEngine(directory, concurrency=2)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def policy() -> dict[str, Tensor]:
        return {n: bf16(p.detach().numpy().copy()) for n, p in model.named_parameters()}

    def canary() -> Canary:
        rounded = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in rounded.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        return _scored(rounded, 1e-4)

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


async def test_adapters_travel_alone(tmp_path: Path) -> None:
    """A policy of adapters only: the engine applies them to the weights that it has loaded."""
    directory = tiny.build(tmp_path / "model")
    engine = TorchEngine(directory, concurrency=2)
    merged = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    layers = {name: m for name, m in merged.named_modules() if name.endswith(("q_proj", "up_proj"))}
    loaded = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    initial = {n: bf16(p.detach().numpy().copy()) for n, p in merged.named_parameters()}
    random = np.random.default_rng(0)

    def adapters() -> dict[str, Tensor]:
        policy: dict[str, Tensor] = {}
        for name, layer in layers.items():
            for factor, shape in (("A", (4, layer.in_features)), ("B", (layer.out_features, 4))):
                values = random.normal(0, 0.3, shape).astype(np.float32)
                policy[f"base_model.model.{name}.lora_{factor}.weight"] = bf16(values)
        return policy

    def canary(policy: dict[str, Tensor]) -> Canary:
        for name, layer in layers.items():
            a, b = (
                torch.from_numpy(policy[f"base_model.model.{name}.lora_{f}.weight"].view(np.int16))
                .view(torch.bfloat16)
                .to(torch.float32)
                for f in "AB"
            )
            layer.weight.data = loaded[name] + b @ a
        return _scored(merged, 1e-4)

    try:
        with publisher() as broadcast:
            async with node(broadcast.address, engine, initial) as receiver:
                for version in range(3):
                    policy = adapters()
                    broadcast.publish(version, policy.items(), canary(policy))
                    await receiver.wait_for(version, DEADLINE)
                    assert engine.version == version
    finally:
        await engine.close()


def _scored(model: Any, tolerance: float) -> Canary:
    tokens = torch.from_numpy(PROMPT.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
    return Canary(PROMPT, logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy(), tolerance)
