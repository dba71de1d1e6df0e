"""A gateway on HTTP over a real engine, which serves a tiny model that calls a tool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from leeway.trajectory import Sampling, Task
from rollout_service.answers import AnswerFormat
from rollout_service.engines.base import Engine
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.gateway.answering import Gateway
from rollout_service.gateway.server import build_app, serve
from rollout_service.gateway.sessions import Session
from rollout_service.prompts import Renderer
from tests.gateway import agent_model

MAX_NEW_TOKENS = 64


@dataclass
class Served:
    """A running gateway.

    Attributes:
        offered: What /sessions hands out, one after the other.
    """

    gateway: Gateway
    engine: Engine
    url: str
    offered: list[tuple[Session, Task, int]]

    def open(self, temperature: float = 0.0, seed: int = 7, max_new_tokens: int = 0) -> Session:
        sampling = Sampling(
            temperature=temperature, max_new_tokens=max_new_tokens or MAX_NEW_TOKENS
        )
        return self.gateway.open(sampling, seed)

    def take(self) -> tuple[Session, Task, int] | None:
        return self.offered.pop(0) if self.offered else None


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agent_model.build(tmp_path_factory.mktemp("agent-model"))


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    engine = TorchEngine(model, concurrency=16)
    tokenizer = AutoTokenizer.from_pretrained(model)
    renderer = Renderer(tokenizer, engine.context_length, MAX_NEW_TOKENS)
    gateway = Gateway(engine, renderer, AnswerFormat(tokenizer), max_requests=64)
    result = Served(gateway, engine, "", [])
    app = build_app(gateway, "tiny", result, token=None)
    try:
        async with serve(app, "127.0.0.1:0") as address:
            result.url = f"http://{address}"
            yield result
    finally:
        await engine.close()
