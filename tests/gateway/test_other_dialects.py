"""Unchanged clients of the other dialects: Anthropic's messages, OpenAI's responses."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from tests.gateway.conftest import Served

ANTHROPIC_TOOLS: list[Any] = [
    {
        "name": "add",
        "description": "Adds two numbers.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    }
]
RESPONSES_TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "add",
        "description": "Adds two numbers.",
        "strict": False,
        "parameters": ANTHROPIC_TOOLS[0]["input_schema"],
    }
]


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_s_client_uses_tools(served: Served, stream: bool) -> None:
    session = served.open()
    messages: list[Any] = [{"role": "user", "content": "add 2 5 and 1 6"}]
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key=session.key) as client:

        async def ask() -> anthropic.types.Message:
            given: Any = {
                "model": "m",
                "max_tokens": 64,
                "system": "Be brief.",
                "messages": messages,
                "tools": ANTHROPIC_TOOLS,
            }
            if not stream:
                return await client.messages.create(**given)
            async with client.messages.stream(**given) as events:
                return await events.get_final_message()

        answer = await ask()
        assert answer.stop_reason == "tool_use"
        calls: list[Any] = [block for block in answer.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"a": 2, "b": 5}, {"a": 1, "b": 6}]
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": str(call.input["a"] + call.input["b"]),
            }
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
        final = await ask()
    block: Any = final.content[0]
    assert block.text == "It is 7 and 7."
    assert final.stop_reason == "end_turn"
    assert session.conversation.sampled().branch_starts == ()
    assert final.usage.output_tokens == session.conversation.answers[1].token_ids.size


async def test_anthropic_s_stop_sequences_and_errors(served: Served) -> None:
    session = served.open()
    messages: list[Any] = [{"role": "user", "content": "add 3 4"}]
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key=session.key) as client:
        answer = await client.messages.create(
            model="m", max_tokens=64, messages=messages, stop_sequences=['"b"']
        )
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", '"b"')
        with pytest.raises(anthropic.BadRequestError, match="policy itself decides"):
            await client.messages.create(
                model="m",
                max_tokens=64,
                messages=messages,
                tools=ANTHROPIC_TOOLS,
                tool_choice={"type": "any"},
            )
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="m", max_tokens=64, messages=messages)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("remembers", [False, True])
async def test_the_responses_api_uses_tools(served: Served, stream: bool, remembers: bool) -> None:
    session = served.open()
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=session.key) as client:

        async def ask(given: list[Any], **more: Any) -> Any:
            options = {"model": "m", "input": given, "tools": RESPONSES_TOOLS, **more}
            if not stream:
                return await client.responses.create(**options)
            async with client.responses.stream(**options) as events:
                return await events.get_final_response()

        question: list[Any] = [{"role": "user", "content": "add 3 4"}]
        answer = await ask(question)
        (call,) = [item for item in answer.output if item.type == "function_call"]
        given = json.loads(call.arguments)
        result = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": str(given["a"] + given["b"]),
        }
        if remembers:
            final = await ask([result], previous_response_id=answer.id)
        else:
            final = await ask([*question, *answer.output, result])
    assert final.output_text == "It is 7."
    sampled = session.conversation.sampled()
    assert sampled.branch_starts == ()
    trained = sampled.token_ids[sampled.prompt_length :][sampled.loss_mask]
    answers = session.conversation.answers
    assert np.array_equal(trained, np.concatenate([a.token_ids for a in answers]))
