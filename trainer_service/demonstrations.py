"""Answers that were written rather than sampled, as trajectories that a step can be packed from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from leeway.errors import ConfigError, DataError
from leeway.tasks import Row
from leeway.trajectory import FinishReason, Group, Sampling, Task, Trajectory
from leeway.versions import VersionSpan


class Demonstrations:
    """Renders rows of a task source with a model's own chat template."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        """
        Args:
            tokenizer: Of `transformers`.
            context: Longest prompt and answer, in tokens.

        Raises:
            ConfigError: The tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                "model.path: its tokenizer has no chat template; use an instruct model, or put a "
                "chat_template.jinja into its directory"
            )
        self._tokenizer = tokenizer
        self._context = context

    def group(self, row: Row, columns: Sequence[str], number: int) -> Group:
        """The answers that a row's columns hold, as one group.

        Args:
            columns: E.g. ("answer",), or ("chosen", "rejected").
            number: Names the group.

        Raises:
            DataError: A column is missing or empty, or prompt and answer exceed the context.
        """
        sampling = Sampling(max_new_tokens=self._context)
        name = f"row-{number:08d}"
        prompt = self._text(row, None)
        members = []
        for index, column in enumerate(columns):
            written = str(row.columns.get(column, ""))
            if not written:
                raise DataError(
                    f"row {number}: it has no {column!r}, only {sorted(row.columns)}; give every "
                    f"row the columns {', '.join(columns)}"
                )
            whole = self._text(row, written)
            if not whole.startswith(prompt):
                raise DataError(
                    f"row {number}: the chat template changes the prompt once there is an answer, "
                    "so that training and sampling would differ; use another template"
                )
            start, answer = self._encode(prompt), self._answer(whole[len(prompt) :])
            if len(start) + len(answer) > self._context:
                raise DataError(
                    f"row {number}: prompt and {column} have {len(start)} + {len(answer)} tokens, "
                    f"the context is {self._context}; leave the row out (task.keep)"
                )
            members.append(
                Trajectory(
                    trajectory_id=f"{name}-{index}",
                    task_id=name,
                    index=index,
                    token_ids=np.array([*start, *answer], dtype=np.int32),
                    prompt_length=len(start),
                    logprobs=np.zeros(len(answer), dtype=np.float32),
                    loss_mask=np.ones(len(answer), dtype=np.bool_),
                    versions=(VersionSpan(0, len(answer)),),
                    finish_reason=FinishReason.STOP,
                    sampling=sampling,
                )
            )
        task = Task(name, number, row.messages, {}, len(columns), sampling, 0)
        return Group(task, tuple(members))

    def _text(self, row: Row, answer: str | None) -> str:
        messages = [dict(message) for message in row.messages]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        return str(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=answer is None, tokenize=False
            )
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _answer(self, text: str) -> list[int]:
        """The tokens that a model should sample: up to its end of turn, with it."""
        ids, end = self._encode(text), self._tokenizer.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else [*ids, end]
