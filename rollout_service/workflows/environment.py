"""An environment acts: the loop of asking the model, calling its tools or stepping, and scoring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_service.gateway.messages import Message, canonical_message, function_tool
from rollout_service.gateway.requests import Ask, Choice
from rollout_service.gateway.sessions import Session
from rollout_service.sandbox.work import Caller, Workers
from rollout_service.workflows.base import Sample


class EnvironmentProgram:
    """The `Program` of `task.environment`: each episode keeps a worker of its own.

    Args:
        turns: Most answers of the model in an episode.
        patience: How long an episode may wait for a worker.
    """

    def __init__(self, workers: Workers, turns: int, patience: float) -> None:
        self._workers = workers
        self._turns = turns
        self._patience = patience

    async def run(self, sample: Sample, session: Session) -> None:
        async with self._workers.take(self._patience) as ask:
            begun = await ask({"reset": dict(sample.task.columns)})
            first = begun["messages"]
            messages = list(
                map(canonical_message, sample.task.messages if first is None else first)
            )
            choice = None
            for turn in range(self._turns):
                choice = await _answer(session, messages, begun["tools"], turn)
                messages.append(choice.message)
                more = await (_step if begun["stepwise"] else _call_tools)(ask, session, choice)
                if more is None or choice.finish == "length":
                    break
                messages.extend(more)
            assert choice is not None  # at least one turn
            ended = await ask({"score": choice.message["content"]})
            if ended["outcome"] is not None:
                session.finish(ended["outcome"])


async def _answer(
    session: Session, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], turn: int
) -> Choice:
    shown = tuple(
        function_tool(tool["name"], tool["description"], tool["parameters"]) for tool in tools
    )
    call = session.ask(Ask(messages=tuple(messages), tools=shown), f"turn {turn}")
    return (await call.deliver()).choices[0]


async def _call_tools(ask: Caller, session: Session, choice: Choice) -> list[Message] | None:
    """Results of the tools that the model called; None when it called none."""
    calls = choice.message.get("tool_calls")
    if not calls:
        return None
    results: list[Message] = []
    for call in calls:
        function = call["function"]
        answer = await ask({"call": function["name"], "arguments": function["arguments"]})
        results.append({"role": "tool", "content": answer["result"], "tool_call_id": call["id"]})
    return results


async def _step(ask: Caller, session: Session, choice: Choice) -> list[Message] | None:
    """What the environment says to the model's action; None when the episode is done."""
    answer = await ask({"step": choice.message["content"]})
    if answer["reward"] is not None:
        session.rate(answer["reward"])
    if answer["done"]:
        return None
    return [{"role": "user", "content": answer["observation"]}]
