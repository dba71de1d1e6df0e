"""Opens the engine that the configuration asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from leeway.config import Config
from leeway.errors import InfrastructureError
from rollout_service.engines.base import Engine
from rollout_service.engines.server import Server
from rollout_service.engines.server_engine import ServerEngine
from rollout_service.engines.server_process import server_process
from rollout_service.engines.sglang_server import SglangServer
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.engines.torch_model import stop_tokens
from rollout_service.engines.vllm_server import VllmServer


@asynccontextmanager
async def open_engine(config: Config, model: Path, node_id: str) -> AsyncIterator[Engine]:
    """The engine of `rollout.engine`, serving the model directory's weights as version 0.

    Raises:
        EngineError: it cannot serve the model, or lacks what training needs.
        InfrastructureError: its server ended while it started, or was not ready in time.
    """
    settings = config.rollout.engine
    async with AsyncExitStack() as stack:
        engine: Engine
        if settings.kind == "torch":
            engine = await asyncio.to_thread(
                TorchEngine,
                model,
                concurrency=config.rollout.most_concurrency,
                context=config.model.context,
                deterministic=settings.deterministic,
            )
        elif settings.url is not None:
            engine = await _connect(config, settings.url, model)
        else:
            assert settings.command is not None  # EngineConfig: one of the two
            log = config.run.path / "logs" / f"engine-{node_id}.log"
            url, process = await stack.enter_async_context(
                server_process(settings.command, model, log)
            )
            connecting = asyncio.create_task(_connect(config, url, model))
            ending = asyncio.create_task(process.wait())
            await asyncio.wait({connecting, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if not connecting.done():
                connecting.cancel()
                raise InfrastructureError(
                    f"rollout.engine.command ended with status {process.returncode} while it "
                    f"started; see {log}"
                )
            engine = connecting.result()
        stack.push_async_callback(engine.close)
        yield engine


async def _connect(config: Config, url: str, model: Path) -> ServerEngine:
    settings = config.rollout.engine
    server: Server[Any]
    server = VllmServer(url, stop_tokens(model)) if settings.kind == "vllm" else SglangServer(url)
    return await ServerEngine.connect(
        server,
        model,
        start_seconds=settings.start_seconds,
        context=config.model.context,
    )
