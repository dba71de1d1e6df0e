"""What the model said: sampled ids to text, reasoning and tool calls, at once or as they come.

The parsing is transformers' (`ResponseParser`), by the tokenizer's own response template, or else
by the usual notation that its chat template shows (<tool_call> with JSON, <think>). A call that is
not well-formed is text: the agent sees what the model wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers.utils.chat_parsing import ResponseParser

from leeway.trajectory import Int32Array

_CONTENT = {"content": "text", "content_args": {"strip": False}}
_THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
_TOOL_CALLS = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "repeats": True,
    "transform": {
        "type": "function",
        "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
    },
}
# What the parser raises on notation that it cannot read.
_PARSE_ERRORS = (ValueError, KeyError, TypeError)
# Of one character, a token may hold a part; it decodes to this.
_PARTIAL = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes: what is still partial after so many tokens stays so.
_PARTIAL_TOKENS = 4


class Delta(NamedTuple):
    """Text that has become certain: of `content` or of `reasoning`."""

    part: str
    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """A whole answer.

    Attributes:
        tool_calls: (name, arguments).
    """

    content: str
    reasoning: str
    tool_calls: tuple[tuple[str, Mapping[str, Any]], ...]


class AnswerFormat:
    """How this model writes answers; one for a node."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._own = getattr(tokenizer, "response_template", None)
        template = str(tokenizer.chat_template)
        self._tools = "<tool_call>" in template and "<function=" not in template
        self._thinks = "<think>" in template
        self.skips_special = self._own is None

    def reader(
        self, prompt: str, tools: Sequence[dict[str, Any]], stop: Sequence[str] = ()
    ) -> AnswerReader:
        """Reads one answer.

        Args:
            prompt: Text before it: templates may begin the answer themselves.
            tools: Empty: calls are text.
            stop: Texts that end the answer and are no part of it.
        """
        parser = None
        if self._own is not None:
            parser = ResponseParser(self._own, prefix=prompt, tools=list(tools))
        elif self._thinks or (tools and self._tools):
            fields: dict[str, Any] = {"content": _CONTENT}
            if self._thinks:
                fields["thinking"] = _THINKING
            if tools and self._tools:
                fields["tool_calls"] = _TOOL_CALLS
            begun = "<think>" if prompt.rstrip().endswith("<think>") else ""
            template = {"start_anchor": "<answer-begins>", "fields": fields}
            parser = ResponseParser(template, prefix=begun, tools=list(tools))
        return AnswerReader(self, parser, stop)


class AnswerReader:
    """Reads one answer's ids; see `AnswerFormat.reader`.

    Attributes:
        stopped: After how many ids a stop text was complete; None while it is not.
        stop_text: Which one it was.
    """

    def __init__(
        self, form: AnswerFormat, parser: ResponseParser | None, stop: Sequence[str]
    ) -> None:
        self._form = form
        self._parser = parser
        self._stop = [text for text in stop if text]
        self._ids: list[int] = []
        self._decoded = 0
        self._text = ""
        self._given = 0
        self._parts = {"content": "", "reasoning": ""}
        self._calls: list[tuple[str, Any]] = []
        self.stopped: int | None = None
        self.stop_text: str | None = None

    def feed(self, token_ids: Int32Array) -> list[Delta]:
        """Takes further ids; returns what has become certain."""
        # A stop text is found at the very id that completes it.
        at_once = 1 if self._stop else max(1, token_ids.size)
        for start in range(0, token_ids.size, at_once):
            if self.stopped is not None:
                break
            self._ids += token_ids[start : start + at_once].tolist()
            self._decode()
        end = len(self._text) if self.stopped is not None else self._certain()
        return self._parse(end)

    def finish(self) -> tuple[Said, list[Delta]]:
        """The whole answer, and what of it no `feed` has returned yet."""
        self._decode(final=True)
        deltas = self._parse(len(self._text))
        if self._parser is not None:
            try:
                _, events = self._parser.finalize()
                deltas += self._take(events)
            except _PARSE_ERRORS:
                deltas += self._as_text()
        said = Said(self._parts["content"], self._parts["reasoning"], tuple(self._calls))
        return said, deltas

    def _decode(self, final: bool = False) -> None:
        """Adds the text of ids that make whole characters."""
        if self._decoded == len(self._ids):
            return
        # Some tokenizers drop a leading space: text is told apart from that of one id more.
        first = max(0, self._decoded - 1)
        known = len(self._to_text(self._ids[first : self._decoded])) if self._decoded else 0
        for end in range(len(self._ids), self._decoded, -1):
            text = self._to_text(self._ids[first:end])[known:]
            waited = len(self._ids) - end + 1
            if final or not text.endswith(_PARTIAL) or waited == _PARTIAL_TOKENS:
                break
        else:
            return
        self._decoded = end
        self._text += text
        for stop in self._stop:
            place = self._text.find(stop, max(0, self._given - len(stop)))
            if place >= 0:
                self._text = self._text[:place]
                self.stopped, self.stop_text = len(self._ids), stop

    def _to_text(self, ids: list[int]) -> str:
        return str(self._form.tokenizer.decode(ids, skip_special_tokens=self._form.skips_special))

    def _certain(self) -> int:
        """How much of the text is no beginning of a stop text."""
        longest = max(map(len, self._stop), default=0)
        for start in range(max(self._given, len(self._text) - longest), len(self._text)):
            if any(stop.startswith(self._text[start:]) for stop in self._stop):
                return start
        return len(self._text)

    def _parse(self, end: int) -> list[Delta]:
        text, self._given = self._text[self._given : end], max(self._given, end)
        if not text:
            return []
        if self._parser is None:
            return self._add("content", text)
        try:
            return self._take(self._parser.feed(text))
        except _PARSE_ERRORS:
            return self._as_text()

    def _take(self, events: Sequence[Mapping[str, Any]]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            kind, name = event["type"], event["field"]
            if kind == "region_chunk" and name in ("content", "thinking", "reasoning_content"):
                part = "content" if name == "content" else "reasoning"
                deltas += self._add(part, event["text"])
            elif kind == "region_close" and name == "tool_calls":
                value = event["value"]
                for call in value if isinstance(value, list) else [value]:
                    function = call["function"]
                    if not isinstance(function["arguments"], Mapping):
                        return deltas + self._as_text()
                    self._calls.append((str(function["name"]), function["arguments"]))
        return deltas

    def _as_text(self) -> list[Delta]:
        """From here on everything is content, what the parser has swallowed included."""
        self._parser = None
        seen = len(self._parts["content"])
        whole = self._text[: self._given]
        missing = whole[seen:] if whole.startswith(self._parts["content"]) else whole
        self._calls.clear()
        return self._add("content", missing)

    def _add(self, part: str, text: str) -> list[Delta]:
        self._parts[part] += text
        return [Delta(part, text)]


def token_texts(tokenizer: Any, token_ids: Int32Array) -> list[str]:
    """The text of each id by itself."""
    return [str(tokenizer.decode(np.array([token]))) for token in token_ids.tolist()]
