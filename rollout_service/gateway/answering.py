"""Asks the engine for the answers of sessions; `Gateway` owns the sessions that are open."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

from prometheus_client import Counter

from leeway.errors import DataError, InfrastructureError
from leeway.trajectory import FinishReason, Int32Array, Sampling
from leeway.versions import beginning
from rollout_service.answers import AnswerFormat, AnswerReader, Said
from rollout_service.engines.base import Engine, GenerateRequest, Generation
from rollout_service.gateway.conversation import Answer
from rollout_service.gateway.messages import Message, tool_call
from rollout_service.gateway.placing import place
from rollout_service.gateway.requests import (
    Ask,
    Choice,
    Completion,
    OverBudgetError,
    SessionError,
)
from rollout_service.gateway.sessions import Call, Session, hash_seed
from rollout_service.prompts import Renderer

ANSWERS = Counter("leeway_gateway_answers_total", "Answers that sessions asked for", ["outcome"])
_CONSTRAINED = Counter(
    "leeway_gateway_constrained_tokens_total",
    "Tokens sampled under a constraint: kept as context, never trained",
)

# An answer takes seconds: soon enough that a client loses little, late enough to calm a burst.
_RETRY_SECONDS = 1.0


class Gateway:
    """The open sessions of a node, over its engine.

    Args:
        max_requests: So many may be under way at once; others are asked to come again.
    """

    def __init__(
        self, engine: Engine, renderer: Renderer, form: AnswerFormat, *, max_requests: int
    ) -> None:
        self.form = form
        self._engine = engine
        self._renderer = renderer
        self._max_requests = max_requests
        self._under_way = 0
        self._sessions: dict[str, Session] = {}

    @property
    def version(self) -> int:
        return self._engine.version

    def open(self, sampling: Sampling, seed: int) -> Session:
        session = Session(self.answer, sampling, seed)
        self._sessions[session.key] = session
        return session

    async def close(self, session: Session) -> None:
        self._sessions.pop(session.key, None)
        await session.end()

    def session(self, key: str) -> Session:
        """Raises `SessionError` when the key opens nothing."""
        session = self._sessions.get(key)
        if session is None:
            raise SessionError(
                "the API key belongs to no open session: it ends with its trajectory; ask for a new"
                " one at /sessions"
            )
        return session

    async def answer(self, session: Session, ask: Ask, call: Call) -> Completion:
        """Samples the answers and adds them to the session's conversation.

        Raises:
            DataError: the request cannot be rendered, or leaves no room to answer.
            OverBudgetError: too much is under way.
            EngineError, InfrastructureError: see `Engine`.
        """
        placed = place(session.conversation.answers, ask, self._renderer)
        prompt = placed.prompt()
        room = self._renderer.context - prompt.size
        if room < 1:
            raise DataError(
                f"messages: {prompt.size} tokens fill the context of {self._renderer.context}; "
                "shorten the conversation (context_length_exceeded)"
            )
        if self._under_way + ask.n > self._max_requests:
            ANSWERS.labels("over_budget").inc(ask.n)
            raise OverBudgetError(
                f"{self._under_way} requests are under way, the limit is {self._max_requests} "
                "(gateway.max_requests)",
                _RETRY_SECONDS,
            )
        sampling = replace(
            session.sampling,
            max_new_tokens=min(session.sampling.max_new_tokens, ask.max_tokens or room, room),
        )
        seed = session.next_seed(ask.seed)
        tools = ask.tools if ask.calls_tools else ()
        live: dict[str, _Live] = {}
        for index in range(ask.n):
            reader = self.form.reader(placed.text, tools, ask.stop)
            request_id = f"{session.session_id}/{uuid.uuid4().hex}"
            live[request_id] = _Live(index, reader, call, self._engine, request_id)
        requests = [
            GenerateRequest(
                request_id=name,
                prompt=prompt,
                sampling=sampling,
                seed=seed if one.index == 0 else hash_seed(seed, one.index),
                constraint=ask.constraint,
                on_tokens=one.take if ask.stream or ask.stop else None,
            )
            for name, one in live.items()
        ]
        self._under_way += ask.n
        outcome = "failed"
        try:
            async for generation in self._engine.generate(requests):
                live[generation.request_id].end(generation)
            outcome = "ok"
        finally:
            self._under_way -= ask.n
            ANSWERS.labels(outcome).inc(ask.n)
        choices = []
        for one in live.values():
            answer = one.answer(placed.parent, placed.context)
            if ask.constraint is not None:
                answer.constrained = True
                _CONSTRAINED.inc(answer.token_ids.size)
            choice = one.choice(answer, ask)
            answer.history = placed.history.answered(choice.message, one.stop_id)
            session.conversation.add(answer)
            choices.append(choice)
        return Completion(
            completion_id=call.call_id,
            created=call.created,
            choices=tuple(choices),
            prompt_tokens=int(prompt.size),
            version=self._engine.version,
        )


class _Live:
    """One answer while it is sampled."""

    def __init__(
        self, index: int, reader: AnswerReader, call: Call, engine: Engine, request_id: str
    ) -> None:
        self.index = index
        self.reader = reader
        self._call = call
        self._engine = engine
        self._request_id = request_id
        self._read = 0
        self._aborting: asyncio.Task[None] | None = None
        self._generation: Generation | None = None
        self.said: Said | None = None

    def take(self, token_ids: Int32Array) -> None:
        """The engine's news: further ids."""
        self._read += token_ids.size
        self._call.grow(self.index, self.reader.feed(token_ids))
        if self.reader.stopped is not None and self._aborting is None:
            self._aborting = asyncio.create_task(self._engine.abort([self._request_id]))

    def end(self, generation: Generation) -> None:
        self._generation = generation
        ids = generation.token_ids[self._read :]
        if self._ended_by_token:
            ids = ids[:-1]
        self._call.grow(self.index, self.reader.feed(ids))
        self.said, deltas = self.reader.finish()
        self._call.grow(self.index, deltas)

    @property
    def _ended_by_token(self) -> bool:
        assert self._generation is not None  # only asked once it has ended
        return self.reader.stopped is None and self._generation.finish_reason is FinishReason.STOP

    @property
    def stop_id(self) -> int | None:
        """The stop token that ended the answer, if one did."""
        assert self._generation is not None
        return int(self._generation.token_ids[-1]) if self._ended_by_token else None

    def answer(self, parent: Answer | None, context: Int32Array) -> Answer:
        """Raises `InfrastructureError` when it was cut off."""
        generation = self._generation
        assert generation is not None  # the engine yields every request, or raises
        finish, end = generation.finish_reason, generation.token_ids.size
        if self.reader.stopped is not None:
            finish, end = FinishReason.STOP, self.reader.stopped
        if finish is FinishReason.UNFINISHED:
            raise InfrastructureError("the answer was cut off; the node is stopping")
        return Answer(
            answer_id=self._call.call_id + (f"-{self.index}" if self.index else ""),
            parent=parent,
            context=context,
            token_ids=generation.token_ids[:end],
            logprobs=generation.logprobs[:end],
            versions=beginning(generation.versions, end),
            finish_reason=finish,
            seconds=generation.seconds,
        )

    def choice(self, answer: Answer, ask: Ask) -> Choice:
        assert self.said is not None
        calls = self.said.tool_calls[: None if ask.parallel_tool_calls else 1]
        message: Message = {"role": "assistant", "content": self.said.content}
        if calls:
            message["tool_calls"] = [
                tool_call(f"call_{uuid.uuid4().hex[:24]}", name, arguments)
                for name, arguments in calls
            ]
        finish = "length" if answer.finish_reason is FinishReason.LENGTH else "stop"
        return Choice(
            answer,
            message,
            self.said.reasoning,
            "tool_calls" if calls else finish,
            self.reader.stop_text,
        )
