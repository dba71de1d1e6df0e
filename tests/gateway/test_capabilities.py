"""A server's capabilities are found out by asking it: here real ones, also llama.cpp."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from leeway.errors import EngineError, InfrastructureError
from rollout_service.engines.capabilities import probe
from rollout_service.gateway.server import serve
from tests import llama_cpp
from tests.gateway.conftest import Served


async def test_our_gateway_returns_what_training_needs(served: Served) -> None:
    session = served.open(temperature=1.0)
    found = await probe(f"{served.url}/v1", "policy", session.key)
    assert found.trains
    assert found.missing == ["json_schema"]


@contextlib.asynccontextmanager
async def _in_front(
    served: Served, change: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> AsyncIterator[str]:
    """A server before the gateway that changes requests, or refuses them where None comes."""
    app = FastAPI()

    @app.post("/v1/{path:path}")
    async def forward(path: str, request: Request) -> Response:
        body = change(json.loads(await request.body()))
        if body is None:
            return Response(status_code=400)
        async with httpx.AsyncClient(timeout=60) as http:
            headers = {"Authorization": request.headers["authorization"]}
            answer = await http.post(f"{served.url}/v1/{path}", json=body, headers=headers)
        return JSONResponse(json.loads(answer.text), answer.status_code)

    async with serve(app, "127.0.0.1:0") as address:
        yield f"http://{address}/v1"


async def test_a_server_without_ids_never_trains(served: Served) -> None:
    own = {"model", "messages", "max_tokens", "seed"}

    def plainly(body: dict[str, Any]) -> dict[str, Any] | None:
        return None if "prompt" in body else {k: v for k, v in body.items() if k in own}

    async with _in_front(served, plainly) as url:
        found = await probe(url, "policy", served.open().key)
    assert not found.trains
    assert found.missing == [
        "prompt_token_ids",
        "token_ids",
        "logprobs",
        "accepts_token_ids",
        "json_schema",
    ]


async def test_a_server_that_refuses_unknown_fields_still_shows_its_logprobs(
    served: Served,
) -> None:
    def strictly(body: dict[str, Any]) -> dict[str, Any] | None:
        return None if "return_token_ids" in body else body

    async with _in_front(served, strictly) as url:
        found = await probe(url, "policy", served.open().key)
    assert found.logprobs
    assert not found.token_ids


async def test_a_server_that_reads_other_ids_does_not_take_ids(served: Served) -> None:
    """One that puts a token before every prompt, for instance."""

    def one_more(body: dict[str, Any]) -> dict[str, Any] | None:
        return {**body, "prompt": [1, *body["prompt"]]} if "prompt" in body else body

    async with _in_front(served, one_more) as url:
        found = await probe(url, "policy", served.open().key)
    assert not found.accepts_token_ids
    assert not found.trains


async def test_a_server_that_refuses_or_is_away(served: Served) -> None:
    with pytest.raises(EngineError, match="refuses model 'policy'"):
        await probe(f"{served.url}/v1", "policy", "wrong key")
    with pytest.raises(InfrastructureError):
        await probe("http://127.0.0.1:9/v1", "policy", "key")


async def test_llama_cpp(tmp_path: Path) -> None:
    """The real server, with random weights."""
    async with llama_cpp.running(tmp_path) as url:
        found = await probe(url, "tiny", "none")
    assert found.trains
    assert found.missing == ["prompt_token_ids"]


async def test_ids_are_given_to_clients_that_ask(served: Served) -> None:
    session = served.open()
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {session.key}"}) as http:
        body = {"messages": [{"role": "user", "content": "add 3 4"}], "return_token_ids": True}
        answer = await http.post(f"{served.url}/v1/chat/completions", json=body)
    choice = json.loads(answer.text)["choices"][0]
    sampled = session.conversation.answers[0]
    assert choice["prompt_token_ids"] == sampled.context.tolist()
    assert choice["token_ids"] == sampled.token_ids.tolist()
