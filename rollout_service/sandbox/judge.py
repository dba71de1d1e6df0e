"""A judge, as a reward function or an environment gets it. Light imports only.

Questions go through the worker's pipe to the node, which has the server's address and key. When a
judge fails, `JudgeFailed` ends the function; it is no `Exception`, so that no handler takes it for
an answer, and the node counts the call as failed whatever comes after.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# The longest question, in one line.
_QUESTION_BYTES = 1 << 20

Messages = str | Sequence[Mapping[str, Any]]


class JudgeFailed(BaseException):
    """The judge's server failed; the call is tried again elsewhere or later."""


class JudgeRefusedError(Exception):
    """The judge's server refused the question, for instance as too long."""


class Judge:
    """A model that somebody serves behind an OpenAI-compatible endpoint.

    Raises:
        JudgeRefusedError: from all methods, when the server refuses the question.
    """

    def __init__(self, name: str, line: Line) -> None:
        self._name = name
        self._line = line

    def __call__(self, messages: Messages, **options: Any) -> str:
        """The text that the model answers to a question, or to chat messages.

        Args:
            options: Further fields of the request: temperature, max_tokens, response_format, ...
        """
        return self.ask_all([messages], **options)[0]

    def ask_all(self, questions: Iterable[Messages], **options: Any) -> list[str]:
        """The answers to several questions, asked at once."""
        asked = [{"messages": _messages(question), **options} for question in questions]
        answers = self._ask([{"path": "/chat/completions", "body": body} for body in asked])
        return [str(answer["choices"][0]["message"]["content"] or "") for answer in answers]

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The JSON that any route of the server answers: its path below the judge's url.

        For reward models (e.g. /score, /classify) and for log-probabilities of /chat/completions.
        """
        return self._ask([{"path": path, "body": body}])[0]

    def _ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        reply = self._line.exchange({"judge": self._name, "requests": requests})
        if "failed" in reply:
            raise JudgeFailed(reply["failed"])
        for answer in reply["answers"]:
            if "refused" in answer:
                raise JudgeRefusedError(answer["refused"])
        return [answer["ok"] for answer in reply["answers"]]


class Line:
    """The worker's pipe, for questions while a call is answered.

    Args:
        write: Sends one line to the node.
        read: Receives one.
    """

    def __init__(self, write: Callable[[bytes], None], read: Callable[[], bytes]) -> None:
        self._write = write
        self._read = read
        self._lock = threading.Lock()
        self._open = False

    def open(self) -> None:
        self._open = True

    def close(self) -> None:
        """Waits for a question under way in another thread."""
        with self._lock:
            self._open = False

    def exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps(question).encode() + b"\n"
        if len(line) > _QUESTION_BYTES:
            raise ValueError(f"a question of {len(line)} bytes; ask less than {_QUESTION_BYTES}")
        with self._lock:
            if not self._open:
                raise RuntimeError("judges answer while the function is called, not afterwards")
            self._write(line)
            reply = self._read()
        if not reply:
            raise SystemExit  # The node is gone.
        answer: dict[str, Any] = json.loads(reply)
        return answer


def _messages(question: Messages) -> list[dict[str, Any]]:
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    return [dict(message) for message in question]
