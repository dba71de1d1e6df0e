"""A program acts in a session of the gateway, and the session becomes the trajectory.

What the program is (an environment, a Python function, a command, something that runs elsewhere) is
a `Program`'s matter; all of them get a session and leave it rated. A session that ends without a
reward, late or by an error is a typed failure, never a reward of 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from types import MappingProxyType
from typing import Protocol

from leeway.errors import DataError, DeadlineError, LeewayError
from leeway.trajectory import Purpose, Trajectory
from rollout_service.gateway.answering import Gateway
from rollout_service.gateway.sessions import Session
from rollout_service.workflows.base import (
    Event,
    Finished,
    Generated,
    Interrupted,
    Sample,
    failed,
)


class Program(Protocol):
    """Acts in sessions; any number at once."""

    async def run(self, sample: Sample, session: Session) -> None:
        """Acts until it is done and rates the session (`Session.finish`, `Session.rate`).

        It may be cancelled at any await, and then must leave nothing behind.

        Raises:
            LeewayError: typed by whose fault it is.
        """
        ...


class Agents:
    """The `Workflow` of `task.environment` and `task.agent`.

    Args:
        seconds: The deadline of one session.
    """

    def __init__(self, gateway: Gateway, program: Program, node_id: str, seconds: float) -> None:
        self._gateway = gateway
        self._program = program
        self._node_id = node_id
        self._seconds = seconds
        self._sessions: dict[str, Session] = {}
        self._acting: dict[str, asyncio.Task[None]] = {}

    async def run(
        self, samples: Sequence[Sample], tell: Callable[[Event], Awaitable[None]]
    ) -> None:
        async with asyncio.TaskGroup() as sessions:
            for sample in samples:
                sessions.create_task(self._session(sample, tell))

    async def abort(self, sample_ids: Collection[str]) -> None:
        for sample_id in sample_ids:
            if sample_id in self._acting:
                self._acting[sample_id].cancel()

    def progress(self, sample_ids: Collection[str]) -> int:
        open_sessions = [self._sessions[name] for name in sample_ids if name in self._sessions]
        return sum(session.tokens for session in open_sessions)

    async def _session(self, sample: Sample, tell: Callable[[Event], Awaitable[None]]) -> None:
        session = self._gateway.open(sample.task.sampling, sample.seed)
        acting = asyncio.create_task(self._program.run(sample, session))
        self._sessions[sample.sample_id] = session
        self._acting[sample.sample_id] = acting
        try:
            ended = await self._outcome(sample, session, acting)
        finally:
            acting.cancel()
            del self._sessions[sample.sample_id], self._acting[sample.sample_id]
            await self._gateway.close(session)
        await tell(Generated(sample))
        await tell(ended)

    async def _outcome(self, sample: Sample, session: Session, acting: asyncio.Task[None]) -> Event:
        done, _ = await asyncio.wait({acting}, timeout=self._seconds)
        if not done:
            acting.cancel()
            await asyncio.wait({acting})
            late = f"the session was not done after {self._seconds:g} s (task.session_seconds)"
            return failed(sample, DeadlineError(late))
        if acting.cancelled():
            # What a program was about to do is lost with it: it begins anew elsewhere.
            return Interrupted(sample, None)
        error = acting.exception()
        if error is not None and not isinstance(error, LeewayError):
            raise error
        try:
            if error is not None:
                raise error
            return Finished(sample, self._trajectory(sample, session))
        except LeewayError as fault:
            return failed(sample, fault)

    def _trajectory(self, sample: Sample, session: Session) -> Trajectory:
        """Raises:
        DataError: the model was never asked, or nothing that it said can be trained.
        RewardError: nobody rated the session.
        """
        sampled = session.conversation.sampled()
        if sample.task.purpose is Purpose.TRAIN and not sampled.loss_mask.any():
            raise DataError(
                "all answers of the session were constrained, so that nothing can be trained: "
                "leave at least one free (docs/gateway.md)"
            )
        score, reward = session.worth()
        rated = sampled.turn_rewards.any()
        return Trajectory(
            trajectory_id=f"{sample.task.task_id}/{sample.index}",
            task_id=sample.task.task_id,
            index=sample.index,
            token_ids=sampled.token_ids,
            prompt_length=sampled.prompt_length,
            logprobs=sampled.logprobs,
            loss_mask=sampled.loss_mask,
            versions=sampled.versions,
            finish_reason=sampled.finish_reason,
            sampling=sample.task.sampling,
            reward=reward,
            score=score,
            node_id=self._node_id,
            generation_seconds=sampled.seconds,
            reward_parts=MappingProxyType(dict(session.outcome.parts)),
            branch_starts=sampled.branch_starts,
            extras=MappingProxyType({"turn_rewards": sampled.turn_rewards} if rated else {}),
        )
