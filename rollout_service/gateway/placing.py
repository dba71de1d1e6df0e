"""Where a request belongs in its session: which answer it continues, and which ids it adds.

Pure, given the renderer. A request continues the answer whose conversation is its longest proper
beginning, if the chat template prints that beginning as it did before; otherwise it begins anew.
Either way its prompt is made of ids that were seen or sampled, and of new text's ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from leeway.errors import DataError
from leeway.trajectory import FinishReason, Int32Array
from rollout_service.gateway.conversation import Answer
from rollout_service.gateway.messages import Message, Tool, fingerprints
from rollout_service.gateway.requests import Ask
from rollout_service.prompts import Renderer


@dataclass(frozen=True, slots=True)
class History:
    """What a request must begin with to continue an answer."""

    said: tuple[bytes, ...]
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    stop_id: int | None = None
    raw: str | None = None

    def answered(self, message: Message, stop_id: int | None) -> History:
        if self.raw is not None:
            return replace(self, raw=self.raw + message["content"])
        return History(
            (*self.said, *fingerprints([message])),
            (*self.messages, message),
            self.tools,
            stop_id,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where a request belongs.

    Attributes:
        parent: The answer that is continued.
        context: int32 [c], what comes behind it, or else the whole prompt.
        text: The whole prompt's text.
        history: Of the request, before it is answered.
    """

    parent: Answer | None
    context: Int32Array
    text: str
    history: History

    def prompt(self) -> Int32Array:
        """int32: what the engine continues."""
        if self.parent is None:
            return self.context
        return np.concatenate([self.parent.sequence(), self.context])


def place(answers: Sequence[Answer], ask: Ask, renderer: Renderer) -> Placed:
    """Raises `DataError` when the chat template refuses the messages or shows no tools."""
    if isinstance(ask.prompt, str):
        return _place_text(answers, ask.prompt, renderer)
    if ask.prompt is not None:
        return _place_ids(answers, np.array(ask.prompt, dtype=np.int32), renderer)
    if ask.tools and not renderer.takes_tools:
        raise DataError(
            "tools: the model's chat template does not show tools; leave them out and describe "
            "them in the prompt, or use a model with a template that does"
        )
    said = fingerprints(ask.messages)
    longest = 0
    parent = None
    for answer in answers:
        known = _history(answer)
        if (
            longest < len(known.said) < len(said)
            and said[: len(known.said)] == known.said
            and known.tools == ask.tools
        ):
            longest, parent = len(known.said), answer
    if parent is not None:
        known = _history(parent)
        messages = (*known.messages, *ask.messages[longest:])
        context = renderer.further_turn(known.messages, messages, known.tools, known.stop_id)
        if context is not None:
            text = renderer.prompt_text(messages, known.tools)
            return Placed(parent, context, text, History(said, messages, known.tools))
    text = renderer.prompt_text(ask.messages, ask.tools)
    return Placed(None, renderer.encode(text), text, History(said, ask.messages, ask.tools))


def _place_text(answers: Sequence[Answer], prompt: str, renderer: Renderer) -> Placed:
    longest = ""
    parent = None
    for answer in answers:
        known = _history(answer).raw or ""
        # A stop token is no part of the text, so that text behind it does not continue it.
        continues = answer.finish_reason is FinishReason.LENGTH
        if continues and len(known) > len(longest) and prompt.startswith(known):
            longest, parent = known, answer
    context = renderer.encode(prompt[len(longest) :])
    return Placed(parent, context, prompt, History((), (), (), raw=prompt))


def _place_ids(answers: Sequence[Answer], prompt: Int32Array, renderer: Renderer) -> Placed:
    longest = 0
    parent = None
    for answer in answers:
        known = answer.sequence()
        if longest < known.size <= prompt.size and np.array_equal(prompt[: known.size], known):
            longest, parent = known.size, answer
    text = renderer.decode(prompt)
    return Placed(parent, prompt[longest:], text, History((), (), (), raw=text))


def _history(answer: Answer) -> History:
    assert isinstance(answer.history, History)  # whoever places a request keeps its history
    return answer.history
