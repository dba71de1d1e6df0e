"""An unchanged `openai` client against the gateway on a real engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest

from rollout_service.gateway.sessions import Session
from tests.gateway.conftest import Served

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


@pytest.fixture
async def session(served: Served) -> Session:
    return served.open()


@pytest.fixture
async def client(served: Served, session: Session) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=session.key, max_retries=0
    ) as one:
        yield one


async def use_tools(client: openai.AsyncOpenAI, question: str) -> list[Any]:
    """Asks, calls the tools that the model calls, and asks again."""
    messages: list[Any] = [{"role": "user", "content": question}]
    answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    messages.append(message)
    for call in message.tool_calls or ():
        given = json.loads(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])}
        messages.append(result)
    final = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    return [*messages, final.choices[0].message]


async def test_a_tool_call_and_its_result_are_one_sequence(
    client: openai.AsyncOpenAI, session: Session, served: Served
) -> None:
    messages = await use_tools(client, "add 3 4")
    assert messages[1].tool_calls[0].function.name == "add"
    assert json.loads(messages[1].tool_calls[0].function.arguments) == {"a": 3, "b": 4}
    assert messages[-1].content == "It is 7."

    sampled = session.conversation.sampled()
    assert sampled.branch_starts == ()
    tokenizer = served.gateway.form.tokenizer
    trained = sampled.token_ids[sampled.prompt_length :][sampled.loss_mask]
    assert tokenizer.decode(trained) == (
        '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call><|im_end|>'
        "It is 7.<|im_end|>"
    )
    masked = sampled.token_ids[sampled.prompt_length :][~sampled.loss_mask]
    assert tokenizer.decode(masked) == ("\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")


async def test_parallel_tool_calls_are_masked_by_provenance(
    client: openai.AsyncOpenAI, session: Session, served: Served
) -> None:
    messages = await use_tools(client, "add 2 5 and 1 6")
    assert [json.loads(c.function.arguments) for c in messages[1].tool_calls] == [
        {"a": 2, "b": 5},
        {"a": 1, "b": 6},
    ]
    assert messages[-1].content == "It is 7 and 7."
    sampled = session.conversation.sampled()
    answers = session.conversation.answers
    trained = sampled.token_ids[sampled.prompt_length :][sampled.loss_mask]
    assert np.array_equal(trained, np.concatenate([a.token_ids for a in answers]))


async def test_one_call_only_when_parallel_calls_are_off(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "add 2 5 and 1 6"}],
        tools=TOOLS,
        parallel_tool_calls=False,
    )
    assert len(answer.choices[0].message.tool_calls or ()) == 1


async def test_tool_choice_none_leaves_calls_as_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "add 3 4"}],
        tools=TOOLS,
        tool_choice="none",
    )
    assert answer.choices[0].message.tool_calls is None
    assert str(answer.choices[0].message.content).startswith("<tool_call>")


async def test_streaming_says_the_same(client: openai.AsyncOpenAI, session: Session) -> None:
    messages: list[Any] = [{"role": "user", "content": "add 3 4"}]
    whole = await client.chat.completions.create(model="m", messages=messages)
    stream = await client.chat.completions.create(
        model="m", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 3
    assert chunks[-1].usage == whole.usage
    first, second = session.conversation.delivered
    assert np.array_equal(first.token_ids, second.token_ids)


async def test_streamed_tool_calls(client: openai.AsyncOpenAI) -> None:
    calls: dict[int, str] = {}
    finish = None
    async for chunk in await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "add 2 5 and 1 6"}],
        tools=TOOLS,
        stream=True,
    ):
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            calls[call.index] = calls.get(call.index, "") + (call.function.arguments or "")
    assert [json.loads(text) for text in calls.values()] == [{"a": 2, "b": 5}, {"a": 1, "b": 6}]
    assert finish == "tool_calls"


async def test_several_choices_and_seeds(served: Served) -> None:
    session = served.open(temperature=4.0)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=session.key) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="m", messages=messages, n=3, seed=11
            )
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
    answers = session.conversation.delivered
    assert len(answers) == 6
    for one, other in zip(answers[:3], answers[3:], strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
    texts = {answer.token_ids.tobytes() for answer in answers}
    assert len(texts) == 3
    sampled = session.conversation.sampled()
    assert len(sampled.branch_starts) == 5
    assert int(sampled.loss_mask.sum()) == sum(answer.token_ids.size for answer in answers)


async def test_logprobs_are_the_sampled_tokens(
    client: openai.AsyncOpenAI, session: Session
) -> None:
    answer = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "add 3 4"}], logprobs=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    given = np.array([entry.logprob for entry in logprobs.content], dtype=np.float32)
    assert np.array_equal(given, session.conversation.answers[0].logprobs)
    assert "".join(entry.token for entry in logprobs.content).startswith("<tool_call>")


async def test_the_temperature_is_the_run_s(client: openai.AsyncOpenAI, session: Session) -> None:
    """What the client asks for does not change the distribution that is learned from."""
    messages: list[Any] = [{"role": "user", "content": "add 3 4"}]
    for temperature in (0.0, 1.9):
        await client.chat.completions.create(
            model="m", messages=messages, temperature=temperature, top_p=0.5
        )
    first, second = session.conversation.answers
    assert np.array_equal(first.token_ids, second.token_ids)


async def test_a_stop_text_ends_the_answer(client: openai.AsyncOpenAI, session: Session) -> None:
    messages: list[Any] = [{"role": "user", "content": "add 3 4"}]
    for stream in (False, True):
        text = ""
        if stream:
            async for chunk in await client.chat.completions.create(
                model="m", messages=messages, stop='"b"', stream=True
            ):
                text += chunk.choices[0].delta.content or ""
        else:
            answer = await client.chat.completions.create(
                model="m", messages=messages, stop=['"b"', "xyz"]
            )
            assert answer.choices[0].finish_reason == "stop"
            text = str(answer.choices[0].message.content)
        assert text == '<tool_call>{"name": "add", "arguments": {"a": 3, '
    first, second = session.conversation.delivered
    assert np.array_equal(first.token_ids, second.token_ids)


async def test_what_cannot_be_served_is_refused(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "add 3 4"}]

    async def refused(**options: Any) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{"model": "m", "messages": messages, **options})
        return str(caught.value)

    assert "tool_choice" in await refused(tools=TOOLS, tool_choice="required")
    assert "response_format" in await refused(response_format={"type": "json_object"})
    picture = {"type": "image_url", "image_url": {"url": "data:,x"}}
    assert "image_url" in await refused(messages=[{"role": "user", "content": [picture]}])
    assert "context_length" in await refused(messages=[{"role": "user", "content": "x" * 700}])


async def test_a_wrong_key_opens_nothing(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="sk-wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="no open session"):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hello"}]
            )


async def test_completions_continue_their_own_text(
    client: openai.AsyncOpenAI, session: Session
) -> None:
    prompt = "<|im_start|>user\nadd 3 4<|im_end|>\n<|im_start|>assistant\n"
    first = await client.completions.create(model="m", prompt=prompt, max_tokens=4)
    assert first.choices[0].finish_reason == "length"
    text = prompt + first.choices[0].text
    second = await client.completions.create(model="m", prompt=text)
    assert (text + second.choices[0].text).endswith(
        '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
    )
    sampled = session.conversation.sampled()
    assert sampled.branch_starts == ()
    assert sampled.loss_mask.all()


async def test_completions_take_ids(client: openai.AsyncOpenAI, session: Session) -> None:
    first = await client.completions.create(model="m", prompt=[5, 6, 7], max_tokens=3, logprobs=0)
    ids = session.conversation.answers[0].sequence()
    assert ids[:3].tolist() == [5, 6, 7]
    assert first.choices[0].logprobs is not None
    await client.completions.create(model="m", prompt=[*ids.tolist(), 9], max_tokens=3)
    assert session.conversation.answers[1].parent is session.conversation.answers[0]
