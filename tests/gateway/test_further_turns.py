"""What is put between two sampled answers: one renderer, golden text, nothing tokenised twice."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from leeway.errors import DataError
from rollout_service.gateway.messages import canonical_message, fingerprint, function_tool
from rollout_service.prompts import Renderer
from tests.gateway import agent_model

# As Qwen3 does it: earlier turns lose their thoughts once a user speaks again.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER: dict[str, Any] = {"role": "user", "content": "hi"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "one"}
NEXT: dict[str, Any] = {"role": "user", "content": "go on"}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return agent_model.tokenizer()


def added(tokenizer: Any, known: list[Any], new: list[Any], stop_id: int | None) -> str | None:
    renderer = Renderer(tokenizer, 500, 10)
    ids = renderer.further_turn(known, [*known, *new], (), stop_id)
    return None if ids is None else str(renderer.decode(ids))


def test_an_answer_that_ended_itself(tokenizer: Any) -> None:
    assert added(tokenizer, [USER, ANSWER], [NEXT], tokenizer.eos_token_id) == (
        "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_was_cut_off_is_closed(tokenizer: Any) -> None:
    assert added(tokenizer, [USER, ANSWER], [NEXT], None) == (
        "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_quotes_the_template(tokenizer: Any) -> None:
    quoted = {"role": "assistant", "content": "a<|im_end|>\nb LeewayAnswer"}
    for stop_id in (tokenizer.eos_token_id, None):
        text = added(tokenizer, [USER, quoted], [NEXT], stop_id)
        assert text is not None and text.count("<|im_end|>") == (1 if stop_id else 2)


def test_a_stop_token_that_the_template_does_not_print(tokenizer: Any) -> None:
    assert added(tokenizer, [USER, ANSWER], [NEXT], tokenizer.pad_token_id) is None


def test_a_template_that_rewrites_the_past_cannot_continue_it(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETFUL
    thought = {"role": "assistant", "content": "<think>hm</think>one"}
    assert added(tokenizer, [USER, thought], [NEXT], tokenizer.eos_token_id) is None
    assert added(tokenizer, [USER, ANSWER], [NEXT], tokenizer.eos_token_id) is not None


def test_several_tools_results_at_once(tokenizer: Any) -> None:
    results = [{"role": "tool", "content": "7"}, {"role": "tool", "content": "8"}]
    assert added(tokenizer, [USER, ANSWER], results, tokenizer.eos_token_id) == (
        "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_printed_in_one_order(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for t in tools %}{{ t | tojson }}{% endfor %}"
    renderer = Renderer(tokenizer, 500, 10)
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
    tool = function_tool("add", "Adds.", schema)
    golden = (
        '{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": '
        '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}}}'
    )
    assert renderer.prompt_text([USER], [tool]) == golden


def test_arguments_as_text_are_objects_for_the_template(tokenizer: Any) -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
    message = canonical_message({"role": "assistant", "content": None, "tool_calls": [call]})
    text = Renderer(tokenizer, 500, 10).prompt_text([message], answer=False)
    assert text == f"<|im_start|>assistant\n{agent_model.call_text(3, 4)}<|im_end|>\n"


def test_messages_that_say_the_same() -> None:
    def call(call_id: str, arguments: Any) -> Any:
        return {"id": call_id, "function": {"name": "add", "arguments": arguments}}

    plain = {"role": "assistant", "content": "", "tool_calls": [call("1", '{"a": 1, "b": 2}')]}
    dressed = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "tool_calls": [call("other", {"b": 2, "a": 1})],
    }
    assert fingerprint(canonical_message(plain)) == fingerprint(canonical_message(dressed))
    other = {**plain, "tool_calls": [call("1", '{"a": 1, "b": 3}')]}
    assert fingerprint(canonical_message(plain)) != fingerprint(canonical_message(other))


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"content": "x"}, "role = None"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "'image_url'"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "name its function"),
    ],
)
def test_messages_that_cannot_be_read(message: Any, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        canonical_message(message)
