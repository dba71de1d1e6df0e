"""Where text and tokens meet: chat messages to prompt ids, sampled ids to the completion's text.

The one renderer of a node: every prompt goes through the tokenizer's chat template, and nothing
that was sampled is ever tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError

from leeway.errors import ConfigError, DataError
from leeway.trajectory import Int32Array


class ChatTokenizer(Protocol):
    """What is used of a `transformers` tokenizer."""

    chat_template: Any

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> Any: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


class Renderer:
    """Renders prompts that leave room for an answer.

    Args:
        context: The longest prompt + answer, in tokens.
        max_new_tokens: The longest answer.

    Raises:
        ConfigError: the tokenizer has no chat template, or the answer alone fills the context.
    """

    def __init__(self, tokenizer: ChatTokenizer, context: int, max_new_tokens: int) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "model.path: its tokenizer has no chat template; use an instruct model, or put a "
                "chat_template.jinja into its directory"
            )
        if max_new_tokens >= context:
            raise ConfigError(
                f"sampling.max_new_tokens = {max_new_tokens}: leaves no room for a prompt in the "
                f"context of {context} tokens; lower it, or raise model.context"
            )
        self._tokenizer = tokenizer
        self._context = context
        self._max_new_tokens = max_new_tokens

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Int32Array:
        """int32 [prompt], ending where the assistant's turn begins.

        Raises:
            DataError: the template refuses the messages, or the prompt leaves no room to answer.
        """
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except TemplateError as error:
            raise DataError(
                f"messages: the model's chat template refuses them: {error}; change the messages, "
                "or the model"
            ) from error
        prompt = np.asarray(ids, dtype=np.int32)
        limit = self._context - self._max_new_tokens
        if prompt.size > limit:
            raise DataError(
                f"messages: the prompt has {prompt.size} tokens, the limit is {limit} (context "
                f"{self._context} - sampling.max_new_tokens {self._max_new_tokens}); shorten the "
                "prompt, lower sampling.max_new_tokens, or raise model.context"
            )
        return prompt

    def text(self, token_ids: Int32Array) -> str:
        """The completion that a reward function sees: sampled ids without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
