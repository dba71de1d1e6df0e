"""What an OpenAI-compatible server can do: asked by one request, not believed by its name.

Without the ids of what it sampled and their log-probabilities a server may judge or be evaluated;
it can never train, since nothing that is tokenised again is what it sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import httpx2 as httpx

from leeway.errors import DeadlineError, EngineError, InfrastructureError

_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Attributes:
    prompt_token_ids: It says which ids it read.
    token_ids: It says which ids it sampled.
    logprobs: It says how likely each was.
    accepts_token_ids: It takes a prompt as ids.
    seed: The same seed gives the same text.
    """

    prompt_token_ids: bool
    token_ids: bool
    logprobs: bool
    accepts_token_ids: bool
    seed: bool

    @property
    def trains(self) -> bool:
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
            try:
                answer = await http.post(f"{base_url}{path}", json={"model": model, **body})
            except httpx.TimeoutException as error:
                raise DeadlineError(f"{base_url}: no answer within {_SECONDS:g} s") from error
            except httpx.TransportError as error:
                raise InfrastructureError(f"{base_url}: {error!r}") from error
            return dict(answer.json()) if answer.status_code == 200 else None

        messages = [{"role": "user", "content": "Say hello."}]
        plain = await ask("/chat/completions", messages=messages, max_tokens=4)
        if plain is None:
            raise EngineError(f"{base_url}/chat/completions: refuses model {model!r}")
        # vLLM and LMDeploy take the first, SGLang the others.
        wishes = {
            "logprobs": True,
            "return_token_ids": True,
            "return_prompt_token_ids": True,
            "seed": 7,
        }
        told = await ask("/chat/completions", messages=messages, max_tokens=4, **wishes)
        again = await ask("/chat/completions", messages=messages, max_tokens=4, **wishes)
        by_ids = await ask("/completions", prompt=[1, 2, 3], max_tokens=1)
    choice = (told or plain)["choices"][0]
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    return Capabilities(
        prompt_token_ids=bool(
            choice.get("prompt_token_ids") or (told or {}).get("prompt_token_ids")
        ),
        token_ids=bool(choice.get("token_ids") or choice.get("response_token_ids")),
        logprobs=bool(logprobs) and all("logprob" in entry for entry in logprobs),
        accepts_token_ids=by_ids is not None,
        seed=told is not None
        and again is not None
        and choice["message"] == again["choices"][0]["message"],
    )
