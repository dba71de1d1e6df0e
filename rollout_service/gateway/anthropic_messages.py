"""Anthropic's `/v1/messages`: JSON to `Ask`, `Completion` to JSON, deltas to events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
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
from rollout_service.gateway.requests import (
    Ask,
    Choice,
    Completion,
    optional,
    refuse_forced_tools,
)
from rollout_service.gateway.sessions import Call

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def parse(body: Mapping[str, Any]) -> Ask:
    """Raises `DataError` naming the field that cannot be served."""
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": plain_text(body["system"])})
    for message in body.get("messages") or ():
        messages.extend(_messages(message))
    choice = body.get("tool_choice") or {}
    return Ask(
        messages=tuple(messages),
        tools=tuple(map(_tool, body.get("tools") or ())),
        calls_tools=refuse_forced_tools(choice.get("type")),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
        max_tokens=optional(body, "max_tokens", int),
        stop=tuple(body.get("stop_sequences") or ()),
        constraint=parse_constraint(body),
        model=str(body.get("model", "")),
        stream=bool(body.get("stream")),
    )


def _messages(message: Mapping[str, Any]) -> Iterator[Message]:
    """A turn's blocks as messages: results of tools are messages of their own."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        yield canonical_message(message)
        return
    texts: list[Mapping[str, Any]] = []
    calls = []
    for block in content:
        kind = block.get("type")
        if kind == "tool_result":
            yield {
                "role": "tool",
                "content": plain_text(block.get("content")),
                "tool_call_id": str(block.get("tool_use_id", "")),
            }
        elif kind == "tool_use":
            calls.append(tool_call(str(block["id"]), str(block["name"]), block.get("input")))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    if texts or calls:
        said: Message = {"role": str(message.get("role")), "content": plain_text(texts)}
        yield {**said, "tool_calls": calls} if calls else said


def _tool(tool: Mapping[str, Any]) -> Tool:
    if "input_schema" not in tool:
        raise DataError(f"tools: {tool!r:.100}: only tools with an input_schema can be called")
    return function_tool(str(tool.get("name")), tool.get("description"), tool["input_schema"])


def render(completion: Completion, ask: Ask) -> dict[str, Any]:
    choice = completion.choices[0]
    return {
        "id": completion.completion_id,
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": list(_blocks(choice)),
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stop_text,
        "usage": {
            "input_tokens": completion.prompt_tokens,
            "output_tokens": completion.completion_tokens,
        },
    }


async def events(call: Call, ask: Ask) -> AsyncIterator[str]:
    message: dict[str, Any] = {
        "id": call.call_id,
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }
    yield _event("message_start", message=message)
    block, part = -1, ""
    async for _, delta in call.follow():
        if delta.part != part:
            if block >= 0:
                yield _event("content_block_stop", index=block)
            block, part = block + 1, delta.part
            yield _event("content_block_start", index=block, content_block=_empty(part))
        name = "text" if part == "content" else "thinking"
        piece = {"type": f"{name}_delta", name: delta.text}
        yield _event("content_block_delta", index=block, delta=piece)
    if block >= 0:
        yield _event("content_block_stop", index=block)
    completion = await call.result()
    choice = completion.choices[0]
    for one in _tool_blocks(choice):
        block += 1
        text = json.dumps(one["input"])
        yield _event("content_block_start", index=block, content_block={**one, "input": {}})
        delta_json = {"type": "input_json_delta", "partial_json": text}
        yield _event("content_block_delta", index=block, delta=delta_json)
        yield _event("content_block_stop", index=block)
    whole = render(completion, ask)
    yield _event(
        "message_delta",
        delta={"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]},
        usage=whole["usage"],
    )
    yield _event("message_stop")


def _empty(part: str) -> dict[str, Any]:
    if part == "content":
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _blocks(choice: Choice) -> Iterator[dict[str, Any]]:
    if choice.reasoning:
        yield {"type": "thinking", "thinking": choice.reasoning, "signature": ""}
    calls = _tool_blocks(choice)
    if choice.message["content"] or not calls:
        yield {"type": "text", "text": choice.message["content"]}
    yield from calls


def _tool_blocks(choice: Choice) -> Sequence[dict[str, Any]]:
    return [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": call["function"]["arguments"],
        }
        for call in choice.message.get("tool_calls", ())
    ]


def _stop_reason(choice: Choice) -> str:
    if choice.stop_text is not None:
        return "stop_sequence"
    return _STOP_REASONS[choice.finish]


def _event(kind: str, **data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"
