"""llama.cpp's real server, over a random model of a few thousand weights."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import gguf
import httpx2 as httpx
import numpy as np

_START_SECONDS = 60.0
_WIDTH, _HEADS, _CONTEXT = 32, 4, 512
_SERVE = """
import sys
import xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path = sys.argv[1]
settings.port = int(sys.argv[2])
settings.n_ctx = 512
settings.n_parallel = 1
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
settings.warmup = False
server = xllamacpp.Server(settings)
sys.stdin.read()
"""
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@contextlib.asynccontextmanager
async def running(directory: Path) -> AsyncIterator[str]:
    """Its URL, with /v1; the server ends with the context."""
    model = directory / "tiny.gguf"
    write(model)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (directory / "llama.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(model), str(port)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(_START_SECONDS), httpx.AsyncClient() as http:
            while True:
                assert server.poll() is None, (directory / "llama.log").read_text()[-2000:]
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                        break
                await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.kill()
        server.communicate()


def write(path: Path) -> None:
    """A Llama of one layer, with one token a byte, and one for "th"."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(2 * _WIDTH)
    writer.add_head_count(_HEADS)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<eos>", *_byte_letters(), "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.2, shape).astype(np.float32))

    def add_norm(name: str) -> None:
        writer.add_tensor(name, np.ones(_WIDTH, dtype=np.float32))

    add("token_embd.weight", len(tokens), _WIDTH)
    for projection in ("q", "k", "v", "output"):
        add(f"blk.0.attn_{projection}.weight", _WIDTH, _WIDTH)
    add("blk.0.ffn_gate.weight", 2 * _WIDTH, _WIDTH)
    add("blk.0.ffn_up.weight", 2 * _WIDTH, _WIDTH)
    add("blk.0.ffn_down.weight", _WIDTH, 2 * _WIDTH)
    for norm in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        add_norm(norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]
