"""What an agent asks for and gets, whatever dialect it speaks.

The dialects build an `Ask` and print a `Completion`; `sessions` turns one into the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leeway.errors import DataError, LeewayError
from leeway.trajectory import Int32Array
from rollout_service.engines.constraint import Constraint
from rollout_service.gateway.conversation import Answer
from rollout_service.gateway.messages import Message, Tool


class OverBudgetError(LeewayError):
    """More is under way than may be; it works again after `retry_seconds`."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class SessionError(LeewayError):
    """The key belongs to no open session."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for `n` answers.

    Attributes:
        messages: Canonical chat messages; or else `prompt` is given.
        prompt: Raw text, or ids, that no chat template touches.
        max_tokens: Of one answer; the run's own limit holds besides.
        stop: Texts that end an answer.
        seed: Asking the same of the same weights with the same seed gives the same ids.
        logprobs: The client wants each token's log-probability.
        token_ids: It wants the ids (vLLM's and SGLang's extension).
        constraint: What the answers are held to; then they are context, and not trained.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[Tool, ...] = ()
    calls_tools: bool = True
    parallel_tool_calls: bool = True
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    token_ids: bool = False
    constraint: Constraint | None = None
    model: str = ""
    stream: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.n <= 128:
            raise DataError(f"n = {self.n}: ask for 1 to 128 answers")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise DataError(f"max_tokens = {self.max_tokens}: ask for at least one token")
        if not self.messages and not self.prompt:
            raise DataError("messages: give at least one message")
        if self.constraint is not None and self.tools and self.calls_tools:
            raise self.constraint.fault(
                "an answer that follows it cannot call a tool; ask with tool_choice none, or "
                "without tools"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One answer, as the client gets it.

    Attributes:
        finish: stop, length or tool_calls.
        stop_text: The stop text that ended the answer, if one did.
        reasoning: Not part of the message: clients do not send it back.
    """

    answer: Answer
    message: Message
    reasoning: str
    finish: str
    stop_text: str | None = None

    @property
    def token_ids(self) -> Int32Array:
        return self.answer.token_ids


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What a request is answered with."""

    completion_id: str
    created: int
    choices: tuple[Choice, ...]
    prompt_tokens: int
    version: int

    def delivered(self) -> None:
        """The client has it."""
        for choice in self.choices:
            choice.answer.delivered = True

    @property
    def completion_tokens(self) -> int:
        return sum(choice.token_ids.size for choice in self.choices)


def optional(body: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    """The body's value of a key, None where it is absent or null.

    Raises:
        DataError: it is of another type.
    """
    value = body.get(key)
    if value is None or (isinstance(value, kind) and not (kind is int and value is True)):
        return value
    wanted = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
    raise DataError(f"{key} = {value!r:.80}: send {wanted}")


def refuse_forced_tools(choice: Any) -> bool:
    """Whether the model may call tools; a choice that forces it to is refused.

    Raises:
        DataError: the engine cannot be made to call a tool.
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind in (None, "auto", "none"):
        return kind != "none"
    raise DataError(
        f"tool_choice = {choice!r:.80}: the policy itself decides what it calls, since a forced "
        "token has no log-probability to learn from; use auto or none"
    )
