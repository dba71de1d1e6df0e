"""What an OpenAI-compatible server can do: asked by a few requests, not believed by its name.

Without the ids of what it sampled and their log-probabilities a server may judge or be evaluated;
it can never train, since nothing that is tokenised again is what it sampled. With them it could
still not be a run's engine: OpenAI's protocol has no way to hand it new weights. SGLang and vLLM
have adapters, which use their own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import httpx2 as httpx

from leeway.errors import DeadlineError, EngineError, InfrastructureError

_SECONDS = 60.0
_MESSAGES = [{"role": "user", "content": "Say hello."}]
# Ids that every vocabulary has.
_PROMPT = [1, 2, 3]
_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
# Under these names servers are asked for ids: vLLM and LMDeploy, SGLang, llama.cpp.
_ID_WISHES = {"return_token_ids": True, "return_prompt_token_ids": True, "return_tokens": True}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Attributes:
    prompt_token_ids: It says which ids it read.
    token_ids: It says which ids it sampled.
    logprobs: It says how likely each was.
    accepts_token_ids: It takes a prompt as ids, and reads these and no others.
    seed: The same seed gives the same text.
    json_schema: Its answer follows a schema that it is given.
    """

    prompt_token_ids: bool
    token_ids: bool
    logprobs: bool
    accepts_token_ids: bool
    seed: bool
    json_schema: bool

    @property
    def trains(self) -> bool:
        """What it samples may be trained on."""
        return self.token_ids and self.logprobs and self.accepts_token_ids

    @property
    def missing(self) -> list[str]:
        return [field.name for field in fields(self) if not getattr(self, field.name)]


async def probe(base_url: str, model: str, key: str) -> Capabilities:
    """Asks for a few tokens.

    Args:
        base_url: With /v1.

    Raises:
        EngineError: it refuses the simplest request.
        InfrastructureError: it is away or late.
    """
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(headers=headers, timeout=_SECONDS) as http:

        async def ask(path: str, **body: Any) -> dict[str, Any] | None:
            """None when it is refused."""
            try:
                answer = await http.post(f"{base_url}{path}", json={"model": model, **body})
            except httpx.TimeoutException as error:
                raise DeadlineError(f"{base_url}: no answer within {_SECONDS:g} s") from error
            except httpx.TransportError as error:
                raise InfrastructureError(f"{base_url}: {error!r}") from error
            return dict(answer.json()) if answer.status_code == 200 else None

        async def chat(**wishes: Any) -> dict[str, Any] | None:
            return await ask("/chat/completions", messages=_MESSAGES, max_tokens=4, **wishes)

        if await chat() is None:
            raise EngineError(f"{base_url}/chat/completions: refuses model {model!r}")
        # Greedily: at random an answer may be over before its first token. Some refuse fields that
        # they do not know.
        greedy = {"logprobs": True, "temperature": 0.0}
        told = await chat(**greedy, **_ID_WISHES) or await chat(**greedy) or {}
        first, second = [await chat(seed=7, temperature=1.0) for _ in range(2)]
        by_ids = await ask("/completions", prompt=_PROMPT, max_tokens=1)
        shaped = await ask(
            "/chat/completions",
            messages=_MESSAGES,
            max_tokens=128,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": _SCHEMA},
            },
        )
    choice = told["choices"][0] if told else {}
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    return Capabilities(
        prompt_token_ids=bool(choice.get("prompt_token_ids") or told.get("prompt_token_ids")),
        token_ids=bool(choice.get("token_ids") or choice.get("response_token_ids"))
        or _all_have("id", logprobs),
        logprobs=_all_have("logprob", logprobs),
        accepts_token_ids=by_ids is not None
        and (by_ids.get("usage") or {}).get("prompt_tokens") == len(_PROMPT),
        seed=first is not None and second is not None and _text(first) == _text(second),
        json_schema=shaped is not None and _follows_schema(_text(shaped)),
    )


def _all_have(key: str, entries: list[dict[str, Any]]) -> bool:
    return bool(entries) and all(entry.get(key) is not None for entry in entries)


def _text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"].get("content") or "")


def _follows_schema(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == ["ok"] and isinstance(value["ok"], bool)
