"""A prompt, one answer, a reward function: the lightest way to write a task.

All samples of a call are one submission to the engine, in order, so that an idle engine's answers
are, bit for bit, a function of the weights and the samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

import numpy as np

from leeway.errors import DataError, EngineError, InfrastructureError, RewardError
from leeway.trajectory import FinishReason, Int32Array, Trajectory
from rollout_service.engines.base import Engine, GenerateRequest, Generation
from rollout_service.prompts import Renderer
from rollout_service.rewards import Scorer
from rollout_service.workflows.base import Event, Finished, Generated, Interrupted, Sample, failed


class SingleTurn:
    """The `Workflow` of `task.reward`."""

    def __init__(self, engine: Engine, renderer: Renderer, rewards: Scorer, node_id: str) -> None:
        self._engine = engine
        self._renderer = renderer
        self._rewards = rewards
        self._node_id = node_id

    async def run(
        self, samples: Sequence[Sample], tell: Callable[[Event], Awaitable[None]]
    ) -> None:
        requests: list[GenerateRequest] = []
        asked: dict[str, Sample] = {}
        prompts: dict[str, Int32Array] = {}
        for sample in samples:
            try:
                task = sample.task
                if task.task_id not in prompts:
                    prompts[task.task_id] = self._renderer.render(task.messages)
                request = _request(sample, prompts[task.task_id])
                self._engine.check(request)
            except (DataError, EngineError) as error:
                await tell(Generated(sample))
                await tell(failed(sample, error))
                continue
            requests.append(request)
            asked[sample.sample_id] = sample
        async with asyncio.TaskGroup() as scoring:
            async for generation in self._engine.generate(requests):
                sample = asked[generation.request_id]
                await tell(Generated(sample))
                prompt = prompts[sample.task.task_id]
                scoring.create_task(self._score(sample, prompt, generation, tell))

    async def abort(self, sample_ids: Collection[str]) -> None:
        await self._engine.abort(list(sample_ids))

    def progress(self, sample_ids: Collection[str]) -> int:
        return self._engine.progress(sample_ids)

    async def _score(
        self,
        sample: Sample,
        prompt: Int32Array,
        generation: Generation,
        tell: Callable[[Event], Awaitable[None]],
    ) -> None:
        trajectory = Trajectory(
            trajectory_id=f"{sample.task.task_id}/{sample.index}",
            task_id=sample.task.task_id,
            index=sample.index,
            token_ids=np.concatenate([prompt, generation.token_ids]),
            prompt_length=prompt.size,
            logprobs=generation.logprobs,
            loss_mask=np.ones(generation.token_ids.size, dtype=np.bool_),
            versions=generation.versions,
            finish_reason=generation.finish_reason,
            sampling=sample.task.sampling,
            node_id=self._node_id,
            generation_seconds=generation.seconds,
        )
        if generation.finish_reason is FinishReason.UNFINISHED:
            await tell(Interrupted(sample, trajectory if generation.token_ids.size else None))
            return
        try:
            text = self._renderer.text(generation.token_ids)
            score = await self._rewards.score(text, sample.task.columns)
        except (RewardError, DataError, InfrastructureError) as error:
            await tell(failed(sample, error))
            return
        await tell(Finished(sample, trajectory.scored(score)))


def _request(sample: Sample, prompt: Int32Array) -> GenerateRequest:
    partial = sample.partial
    resume = None
    if partial is not None:
        resume = Generation(
            request_id=sample.sample_id,
            token_ids=partial.token_ids[partial.prompt_length :],
            logprobs=partial.logprobs,
            versions=partial.versions,
            finish_reason=FinishReason.UNFINISHED,
            seconds=partial.generation_seconds,
        )
    return GenerateRequest(
        request_id=sample.sample_id,
        prompt=prompt,
        sampling=sample.task.sampling,
        seed=sample.seed,
        resume=resume,
    )
