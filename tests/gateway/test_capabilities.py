"""A server's capabilities are found out by asking it; here a real one, whole and crippled."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest

from leeway.errors import EngineError, InfrastructureError
from rollout_service.engines.capabilities import probe
from tests.gateway.conftest import Served


async def test_a_server_that_returns_all(served: Served) -> None:
    session = served.open(temperature=1.0)
    found = await probe(f"{served.url}/v1", "policy", session.key)
    assert found.trains
    assert found.missing == []


async def test_a_server_without_ids_never_trains(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same server behind a proxy that knows OpenAI's own fields only."""
    own = {"model", "messages", "max_tokens", "seed"}
    post = httpx.AsyncClient.post

    async def plainly(self: Any, url: str, *, json: dict[str, Any]) -> httpx.Response:
        if url.endswith("/completions") and "prompt" in json:
            return httpx.Response(404)
        return await post(self, url, json={k: v for k, v in json.items() if k in own})

    monkeypatch.setattr(httpx.AsyncClient, "post", plainly)
    found = await probe(f"{served.url}/v1", "policy", served.open().key)
    assert not found.trains
    assert found.missing == ["prompt_token_ids", "token_ids", "logprobs", "accepts_token_ids"]


async def test_a_server_that_refuses_or_is_away(served: Served) -> None:
    with pytest.raises(EngineError, match="refuses model 'policy'"):
        await probe(f"{served.url}/v1", "policy", "wrong key")
    with pytest.raises(InfrastructureError):
        await probe("http://127.0.0.1:9/v1", "policy", "key")


async def test_ids_are_given_to_clients_that_ask(served: Served) -> None:
    session = served.open()
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {session.key}"}) as http:
        body = {"messages": [{"role": "user", "content": "add 3 4"}], "return_token_ids": True}
        answer = await http.post(f"{served.url}/v1/chat/completions", json=body)
    choice = json.loads(answer.text)["choices"][0]
    sampled = session.conversation.answers[0]
    assert choice["prompt_token_ids"] == sampled.context.tolist()
    assert choice["token_ids"] == sampled.token_ids.tolist()
