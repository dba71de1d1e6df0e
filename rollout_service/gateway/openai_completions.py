"""OpenAI's older `/v1/completions`: a prompt of text or ids that no chat template touches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from itertools import accumulate
from typing import Any

from leeway.errors import DataError
from rollout_service.answers import AnswerFormat, token_texts
from rollout_service.gateway.constraints import parse_constraint
from rollout_service.gateway.openai_chat import event, usage
from rollout_service.gateway.requests import Ask, Choice, Completion, optional
from rollout_service.gateway.sessions import Call


def parse(body: Mapping[str, Any]) -> Ask:
    """Raises `DataError` naming the field that cannot be served."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple):
        raise DataError(f"prompt = {prompt!r:.80}: send one prompt, as text or token ids")
    stop = body.get("stop") or ()
    return Ask(
        prompt=prompt,
        n=optional(body, "n", int) or 1,
        max_tokens=optional(body, "max_tokens", int),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=optional(body, "seed", int),
        logprobs=body.get("logprobs") is not None,
        constraint=parse_constraint(body),
        model=str(body.get("model", "")),
        stream=bool(body.get("stream")),
    )


def render(completion: Completion, ask: Ask, form: AnswerFormat) -> dict[str, Any]:
    return {
        "id": completion.completion_id,
        "object": "text_completion",
        "created": completion.created,
        "model": ask.model,
        "system_fingerprint": f"policy-{completion.version}",
        "choices": [
            {
                "index": index,
                "text": choice.message["content"],
                "finish_reason": choice.finish,
                "logprobs": _logprobs(choice, form) if ask.logprobs else None,
            }
            for index, choice in enumerate(completion.choices)
        ],
        "usage": usage(completion),
    }


async def events(call: Call, ask: Ask) -> AsyncIterator[str]:
    head: dict[str, Any] = {
        "id": call.call_id,
        "object": "text_completion",
        "created": call.created,
        "model": ask.model,
    }

    def chunk(index: int, text: str, finish: str | None = None) -> str:
        choice = {"index": index, "text": text, "finish_reason": finish, "logprobs": None}
        return event({**head, "choices": [choice]})

    async for index, delta in call.follow():
        yield chunk(index, delta.text)
    completion = await call.result()
    for index, choice in enumerate(completion.choices):
        yield chunk(index, "", choice.finish)
    yield "data: [DONE]\n\n"


def _logprobs(choice: Choice, form: AnswerFormat) -> dict[str, Any]:
    texts = token_texts(form.tokenizer, choice.token_ids)
    return {
        "tokens": texts,
        "token_logprobs": choice.answer.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": [0, *accumulate(map(len, texts[:-1]))] if texts else [],
    }
