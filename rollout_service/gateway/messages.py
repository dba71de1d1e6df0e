"""Chat messages in the one form that chat templates take, whatever dialect they came in.

A message is {"role", "content": text} and, where they apply, "tool_calls": [{"id", "type",
"function": {"name", "arguments": object}}], "tool_call_id" and "name". Nothing else survives, so
that a client which adds fields to what it was given (refusal, annotations, audio) still continues
the conversation that it had.

Who calls: the dialects, for what a client sent, and `sessions`, for what the model said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from leeway.errors import DataError

Message = dict[str, Any]
Tool = dict[str, Any]

_ROLES = {"developer": "system", "function": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def canonical_message(message: Mapping[str, Any]) -> Message:
    """The message in the form above.

    Raises:
        DataError: it has no role, or content that is not text.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise DataError(f"messages: role = {role!r}: name who speaks, e.g. user")
    result: Message = {
        "role": _ROLES.get(role, role),
        "content": plain_text(message.get("content")),
    }
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [_canonical_call(call) for call in calls]
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            result[key] = str(message[key])
    return result


def plain_text(content: Any) -> str:
    """Text of a message's content: a string, or parts of text.

    Raises:
        DataError: a part is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise DataError(
                f"messages: content of type {kind or type(part).__name__!r}: this model reads "
                "text only; send parts of type text"
            )
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "".join(texts)


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """One call in canonical form; arguments as an object where they are one."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        # Templates index into arguments: text would break them, unless it is no object at all.
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }


def function_tool(name: str, description: str | None, parameters: Any) -> Tool:
    """A tool's schema with its keys in the one order in which templates shall print them."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description or "",
            "parameters": parameters or {"type": "object", "properties": {}},
        },
    }


def fingerprint(message: Message) -> bytes:
    """Equal for messages that say the same.

    What names a call is left out (some clients number calls anew), and so is `name`, which some
    add to their own messages.
    """
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", ())
    ]
    said = [message["role"], message["content"], calls]
    return xxhash.xxh3_128_digest(json.dumps(said, sort_keys=True).encode())


def fingerprints(messages: Sequence[Message]) -> tuple[bytes, ...]:
    return tuple(map(fingerprint, messages))


def _canonical_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"messages: tool call {call!r:.100}: name its function")
    return tool_call(str(call.get("id", "")), function["name"], function.get("arguments"))
