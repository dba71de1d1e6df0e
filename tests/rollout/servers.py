"""Real SGLang and vLLM servers on a CPU, where LEEWAY_SGLANG_PYTHON and LEEWAY_VLLM_PYTHON name
their Python: `make test-sglang` and `make test-vllm` set them up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_service.engines.server import Server
from rollout_service.engines.server_engine import ServerEngine
from rollout_service.engines.server_process import server_process
from rollout_service.engines.sglang_server import SglangServer
from rollout_service.engines.vllm_server import VllmServer
from tests.rollout.tiny_models import EOS

SGLANG_PYTHON = os.environ.get("LEEWAY_SGLANG_PYTHON", "")
SGLANG = [
    "env", "SGLANG_USE_CPU_ENGINE=1", "OMP_NUM_THREADS=1",
    SGLANG_PYTHON, "-m", "sglang.launch_server", "--model-path", "{model}", "--port", "{port}",
    "--host", "127.0.0.1", "--device", "cpu", "--attention-backend", "torch_native",
    "--disable-overlap-schedule", "--sleep-on-idle", "--dtype", "float32",
    "--mem-fraction-static", "0.3", "--max-total-tokens", "16384",
    "--max-running-requests", "32",
]  # fmt: skip
VLLM_PYTHON = os.environ.get("LEEWAY_VLLM_PYTHON", "")
VLLM = [
    "env", "VLLM_SERVER_DEV_MODE=1", "VLLM_NO_USAGE_STATS=1", "OMP_NUM_THREADS=1",
    "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=1",
    VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}",
    "--port", "{port}", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager",
    "--enable-scale-out", "--max-num-seqs", "32",
    "--enable-prompt-tokens-details",
]  # fmt: skip
AFTER_TEMPERATURE = ["--logprobs-mode", "processed_logprobs"]
WITHOUT_TOKENIZER = ["--skip-tokenizer-init"]
START_SECONDS = 400.0
KINDS = {"sglang": SGLANG, "vllm": VLLM + AFTER_TEMPERATURE}
needs_sglang = pytest.mark.skipif(not SGLANG_PYTHON, reason="LEEWAY_SGLANG_PYTHON is not set")
needs_vllm = pytest.mark.skipif(not VLLM_PYTHON, reason="LEEWAY_VLLM_PYTHON is not set")
SERVERS = [
    pytest.param("sglang", marks=needs_sglang),
    pytest.param("vllm", marks=needs_vllm),
]


@asynccontextmanager
async def connected(command: list[str], model: Path, log: Path) -> AsyncIterator[ServerEngine]:
    async with server_process(command, model, log) as (url, process):
        server: Server[Any] = (
            VllmServer(url, [EOS]) if VLLM_PYTHON in command else SglangServer(url)
        )
        connecting = asyncio.create_task(
            ServerEngine.connect(server, model, start_seconds=START_SECONDS)
        )
        ending = asyncio.create_task(process.wait())
        await asyncio.wait({connecting, ending}, return_when=asyncio.FIRST_COMPLETED)
        assert connecting.done(), log.read_text()[-3000:]
        ending.cancel()
        engine = connecting.result()
        yield engine
        await engine.close()
