"""OpenAI's `/v1/chat/completions`: JSON to `Ask`, `Completion` to JSON, deltas to events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from leeway.errors import DataError
from rollout_service.answers import AnswerFormat, token_texts
from rollout_service.gateway.constraints import parse_constraint
from rollout_service.gateway.messages import Tool, canonical_message, function_tool
from rollout_service.gateway.requests import (
    Ask,
    Choice,
    Completion,
    optional,
    refuse_forced_tools,
)
from rollout_service.gateway.sessions import Call


def parse(body: Mapping[str, Any]) -> Ask:
    """Raises `DataError` naming the field that cannot be served."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise DataError(f"messages = {messages!r:.80}: send a list of messages")
    stop = body.get("stop") or ()
    parallel = optional(body, "parallel_tool_calls", bool)
    return Ask(
        messages=tuple(canonical_message(message) for message in messages),
        tools=tuple(map(parse_tool, body.get("tools") or ())),
        calls_tools=refuse_forced_tools(body.get("tool_choice")),
        parallel_tool_calls=parallel is not False,
        n=optional(body, "n", int) or 1,
        max_tokens=optional(body, "max_completion_tokens", int)
        or optional(body, "max_tokens", int),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=optional(body, "seed", int),
        logprobs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
        constraint=parse_constraint(body),
        model=str(body.get("model", "")),
        stream=bool(body.get("stream")),
    )


def parse_tool(tool: Mapping[str, Any]) -> Tool:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise DataError(f"tools: {tool!r:.100}: only tools of type function can be called")
    return function_tool(
        str(function.get("name")), function.get("description"), function.get("parameters")
    )


def render(completion: Completion, ask: Ask, form: AnswerFormat) -> dict[str, Any]:
    return {
        **_head(completion, ask, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": _message(choice),
                "finish_reason": choice.finish,
                "logprobs": _logprobs(choice, form) if ask.logprobs else None,
                **(_ids(choice) if ask.token_ids else {}),
            }
            for index, choice in enumerate(completion.choices)
        ],
        "usage": usage(completion),
    }


async def events(
    call: Call, ask: Ask, form: AnswerFormat, *, include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events: content as it comes, tool calls once they are whole."""
    head: dict[str, Any] = {
        "id": call.call_id,
        "object": "chat.completion.chunk",
        "created": call.created,
        "model": ask.model,
    }

    def chunk(index: int, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
        return event({**head, "choices": [{**choice, **more}]})

    for index in range(ask.n):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for index, delta in call.follow():
        name = "content" if delta.part == "content" else "reasoning_content"
        yield chunk(index, {name: delta.text})
    completion = await call.result()
    for index, choice in enumerate(completion.choices):
        calls = [{"index": i, **one} for i, one in enumerate(_tool_calls(choice))]
        if calls:
            yield chunk(index, {"tool_calls": calls})
        more = {"logprobs": _logprobs(choice, form)} if ask.logprobs else {}
        yield chunk(index, {}, choice.finish, **more)
    if include_usage:
        yield event({**head, "choices": [], "usage": usage(completion)})
    yield "data: [DONE]\n\n"


def event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _head(completion: Completion, ask: Ask, kind: str) -> dict[str, Any]:
    return {
        "id": completion.completion_id,
        "object": kind,
        "created": completion.created,
        "model": ask.model,
        "system_fingerprint": f"policy-{completion.version}",
    }


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.message["content"]}
    if calls := _tool_calls(choice):
        message |= {"tool_calls": calls, "content": choice.message["content"] or None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    return message


def _tool_calls(choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": arguments_text(call["function"]["arguments"]),
            },
        }
        for call in choice.message.get("tool_calls", ())
    ]


def _logprobs(choice: Choice, form: AnswerFormat) -> dict[str, Any]:
    """Of the sampled tokens; the engine keeps no other token's."""
    texts = token_texts(form.tokenizer, choice.token_ids)
    logprobs = choice.answer.logprobs.tolist()
    return {
        "content": [
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode()),
                "top_logprobs": [],
            }
            for text, logprob in zip(texts, logprobs, strict=True)
        ],
        "refusal": None,
    }


def _ids(choice: Choice) -> dict[str, list[int]]:
    sampled = choice.token_ids
    whole = choice.answer.sequence()
    return {
        "prompt_token_ids": whole[: whole.size - sampled.size].tolist(),
        "token_ids": sampled.tolist(),
    }


def usage(completion: Completion) -> dict[str, int]:
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
    }
