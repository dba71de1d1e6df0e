"""OpenAI's `/v1/responses`: JSON to `Ask`, `Completion` to JSON, deltas to events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from typing import Any

from leeway.errors import DataError
from rollout_service.gateway.constraints import parse_constraint
from rollout_service.gateway.messages import (
    Message,
    Tool,
    canonical_message,
    function_tool,
    plain_text,
    tool_call,
)
from rollout_service.gateway.openai_chat import arguments_text
from rollout_service.gateway.requests import (
    Ask,
    Completion,
    optional,
    refuse_forced_tools,
)
from rollout_service.gateway.sessions import Call


def parse(body: Mapping[str, Any], earlier: Sequence[Message] = ()) -> Ask:
    """Args:
        earlier: The conversation that `previous_response_id` names.

    Raises:
        DataError: naming the field that cannot be served.
    """
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": plain_text(body["instructions"])})
        earlier = [message for message in earlier if message["role"] != "system"]
    messages.extend(earlier)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or ()
    for item in items:
        _add(messages, item)
    return Ask(
        messages=tuple(messages),
        tools=tuple(map(_tool, body.get("tools") or ())),
        calls_tools=refuse_forced_tools(body.get("tool_choice")),
        parallel_tool_calls=optional(body, "parallel_tool_calls", bool) is not False,
        max_tokens=optional(body, "max_output_tokens", int),
        constraint=parse_constraint(body),
        model=str(body.get("model", "")),
        stream=bool(body.get("stream")),
    )


def _add(messages: list[Message], item: Mapping[str, Any]) -> None:
    """An answer comes back as several items: its text and each call are one message again."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(canonical_message(item))
    elif kind == "function_call":
        call = tool_call(str(item["call_id"]), str(item["name"]), item.get("arguments"))
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append(
            {
                "role": "tool",
                "content": plain_text(item.get("output")),
                "tool_call_id": str(item.get("call_id", "")),
            }
        )
    elif kind != "reasoning":
        raise DataError(f"input: item of type {kind!r}: send messages and function calls")


def _tool(tool: Mapping[str, Any]) -> Tool:
    if tool.get("type") != "function":
        raise DataError(f"tools: {tool.get('type')!r}: only tools of type function can be called")
    return function_tool(str(tool.get("name")), tool.get("description"), tool.get("parameters"))


def render(completion: Completion, body: Mapping[str, Any]) -> dict[str, Any]:
    choice = completion.choices[0]
    cut = choice.finish == "length"
    return {
        **_head(completion.completion_id, completion.created, body),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(completion),
        "usage": {
            "input_tokens": completion.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        },
    }


async def events(call: Call, body: Mapping[str, Any]) -> AsyncIterator[str]:
    number = count()

    def event(kind: str, **data: Any) -> str:
        data = {"type": kind, "sequence_number": next(number), **data}
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n"

    begun = {
        **_head(call.call_id, call.created, body),
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    at: dict[str, Any] = {"item_id": f"item_{call.call_id}", "output_index": 0, "content_index": 0}
    text = ""
    async for _, delta in call.follow():
        if delta.part != "content":
            continue
        if not text:
            item = {**_text_item(at["item_id"], ""), "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=0, item=item)
            yield event("response.content_part.added", **at, part=_text_part(""))
        text += delta.text
        yield event("response.output_text.delta", **at, delta=delta.text, logprobs=[])
    if text:
        item = _text_item(at["item_id"], text)
        yield event("response.output_text.done", **at, text=text, logprobs=[])
        yield event("response.content_part.done", **at, part=_text_part(text))
        yield event("response.output_item.done", output_index=0, item=item)
    completion = await call.result()
    for index, item in enumerate(_items(completion)):
        if item["type"] != "function_call":
            continue
        place = {"item_id": item["id"], "output_index": index}
        started = {**item, "arguments": "", "status": "in_progress"}
        arguments = item["arguments"]
        yield event("response.output_item.added", output_index=index, item=started)
        yield event("response.function_call_arguments.delta", **place, delta=arguments)
        yield event(
            "response.function_call_arguments.done",
            **place,
            name=item["name"],
            arguments=arguments,
        )
        yield event("response.output_item.done", output_index=index, item=item)
    whole = render(completion, body)
    yield event(f"response.{whole['status']}", response=whole)


def _items(completion: Completion) -> list[dict[str, Any]]:
    choice = completion.choices[0]
    calls = choice.message.get("tool_calls", ())
    items = []
    if choice.message["content"] or not calls:
        items.append(_text_item(f"item_{completion.completion_id}", choice.message["content"]))
    for call in calls:
        function = call["function"]
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": arguments_text(function["arguments"]),
                "status": "completed",
            }
        )
    return items


def _text_item(item_id: str, text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "id": item_id,
        "role": "assistant",
        "status": "completed",
        "content": [_text_part(text)],
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _head(response_id: str, created: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """What a response repeats of its request."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "model": body.get("model", ""),
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
    }
