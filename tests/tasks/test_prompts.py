"""Messages become prompt ids in one place, and only where an answer still fits."""

from pathlib import Path

import numpy as np
import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from leeway.errors import ConfigError, DataError
from rollout_service.prompts import Renderer
from tests.gateway import agent_model


class Characters:
    """A tokenizer whose tokens are characters; its template refuses the role "tool"."""

    chat_template = "a template"

    def apply_chat_template(self, conversation, *, tools, add_generation_prompt, tokenize):
        assert tools is None and not tokenize
        if any(message["role"] == "tool" for message in conversation):
            raise TemplateError("no tools")
        text = "".join(f"{message['role']}:{message['content']}\n" for message in conversation)
        return text + ("assistant:" if add_generation_prompt else "")

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) for c in text]

    def decode(self, token_ids, *, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(i) for i in token_ids)


def renderer(context: int = 100) -> Renderer:
    return Renderer(Characters(), context=context, max_new_tokens=10)


def test_a_prompt_ends_where_the_answer_begins():
    ids = renderer().render([{"role": "user", "content": "Hi"}])
    assert ids.dtype == np.int32
    assert renderer().text(ids) == "user:Hi\nassistant:"


def test_a_prompt_that_just_fits_and_one_that_does_not():
    message = {"role": "user", "content": "Hi"}
    assert renderer(context=28).render([message]).size == 18
    with pytest.raises(DataError) as raised:
        renderer(context=27).render([message])
    assert str(raised.value) == (
        "messages: the prompt has 18 tokens, the limit is 17 (context 27 - sampling.max_new_tokens "
        "10); shorten the prompt, lower sampling.max_new_tokens, or raise model.context"
    )


def test_messages_that_the_template_refuses():
    with pytest.raises(DataError) as raised:
        renderer().render([{"role": "tool", "content": "42"}])
    assert str(raised.value) == (
        "messages: the model's chat template refuses them: no tools; change the messages, or the "
        "model"
    )


def test_a_tokenizer_without_a_template():
    tokenizer = Characters()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError) as raised:
        Renderer(tokenizer, context=100, max_new_tokens=10)
    assert str(raised.value) == (
        "model.path: its tokenizer has no chat template; use an instruct model, or put a "
        "chat_template.jinja into its directory"
    )


def test_an_answer_that_fills_the_context():
    with pytest.raises(ConfigError) as raised:
        Renderer(Characters(), context=10, max_new_tokens=10)
    assert str(raised.value) == (
        "sampling.max_new_tokens = 10: leaves no room for a prompt in the context of 10 tokens; "
        "lower it, or raise model.context"
    )


@pytest.mark.parametrize(
    "text", ["", " a  b\n", "<|im_start|>user\nHé 🎈<|im_end|>", "</s><eos>", "x" * 5000]
)
def test_ids_are_those_of_the_tokenizer_itself(text: str, tmp_path: Path) -> None:
    """They are asked of the library behind it; a limit of the tokenizer's own cuts nothing off."""
    tokenizer = AutoTokenizer.from_pretrained(agent_model.build(tmp_path, trained=False))
    expected = tokenizer.encode(text, add_special_tokens=False)
    tokenizer.backend_tokenizer.enable_truncation(4)
    own = Renderer(tokenizer, context=100, max_new_tokens=10).encode(text)
    assert own.dtype == np.int32 and own.tolist() == expected
