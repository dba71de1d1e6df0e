"""What the model said, at once and in pieces: the same text, the same calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.answers import AnswerFormat, Said
from tests.gateway import agent_model

TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TOKENIZER = agent_model.tokenizer()
THINKING = agent_model.tokenizer()
THINKING.chat_template = f"<think></think>{THINKING.chat_template}"


def read(
    text: str,
    tools: Any = (),
    stop: tuple[str, ...] = (),
    cuts: tuple[int, ...] = (),
    prompt: str = "",
    tokenizer: Any = TOKENIZER,
) -> tuple[Said, str, int | None]:
    """The answer, its streamed content, and where a stop text ended it."""
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    reader = AnswerFormat(tokenizer).reader(prompt, tools, stop)
    deltas = []
    for piece in np.split(ids, sorted(cut % (ids.size + 1) for cut in cuts)):
        deltas += reader.feed(piece)
    said, last = reader.finish()
    streamed = "".join(d.text for d in [*deltas, *last] if d.part == "content")
    return said, streamed, reader.stopped


CALL = agent_model.call_text(3, 4)
CUTS = st.lists(st.integers(0, 200), max_size=12).map(tuple)


@settings(max_examples=60, deadline=None)
@given(CUTS)
def test_pieces_make_the_whole(cuts: tuple[int, ...]) -> None:
    said, streamed, _ = read(f"First. {CALL}\n{CALL}", TOOLS, cuts=cuts)
    assert said.tool_calls == (("add", {"a": 3, "b": 4}),) * 2
    assert said.content == streamed
    assert said.content.strip() == "First."


@settings(max_examples=60, deadline=None)
@given(CUTS)
def test_a_stop_text_is_held_back_until_it_is_certain(cuts: tuple[int, ...]) -> None:
    said, streamed, stopped = read("say STO and STOP now", stop=("STOP",), cuts=cuts)
    assert said.content == streamed == "say STO and "
    assert stopped == len(TOKENIZER.encode("say STO and STOP", add_special_tokens=False))


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": "add", "argum</tool_call>',
        '<tool_call>{"nom": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "3 4"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}}',
    ],
)
def test_a_call_that_is_not_well_formed_is_text(broken: str) -> None:
    said, streamed, _ = read(f"so {broken}", TOOLS)
    if said.tool_calls:  # The last one is whole but for its end.
        assert said.tool_calls == (("add", {"a": 1}),)
    else:
        assert said.content == streamed == f"so {broken}"


def test_without_tools_a_call_is_text() -> None:
    assert read(CALL)[0] == Said(CALL, "", ())


def test_thoughts_are_apart_also_when_the_template_began_them() -> None:
    said, streamed, _ = read("<think>hm</think>yes", tokenizer=THINKING)
    assert (said.reasoning, said.content, streamed) == ("hm", "yes", "yes")
    said, _, _ = read("hm</think>yes", tokenizer=THINKING, prompt="<|im_start|>\n<think>\n")
    assert (said.reasoning, said.content) == ("hm", "yes")


@pytest.mark.parametrize("at_once", [1, 2, 3, 12])
def test_characters_of_several_tokens_come_whole(at_once: int) -> None:
    class Bytes:
        chat_template = ""

        def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
            return bytes(int(i) for i in ids).decode(errors="replace")

    reader = AnswerFormat(Bytes()).reader("", ())
    text = "a\N{GREEK SMALL LETTER ALPHA}b\N{GRINNING FACE}c"
    deltas = []
    ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
    for start in range(0, ids.size, at_once):
        deltas += reader.feed(ids[start : start + at_once])
    said, last = reader.finish()
    assert said.content == "".join(d.text for d in [*deltas, *last]) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in delta.text for delta in deltas)
