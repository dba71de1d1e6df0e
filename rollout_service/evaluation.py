"""Scores a run's held-out problems as another server answers them: `leeway evaluate`.

The server only has to speak OpenAI's chat dialect: a baseline, a teacher, a policy that was
exported. Problems, sampling and reward are the run's own; nothing of it is ever trained on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from leeway.config import Config, EndpointConfig
from leeway.errors import ConfigError, EngineError, InfrastructureError, RewardError
from leeway.tasks import Sampler, open_source
from leeway.trajectory import Task
from rollout_service.endpoints import Endpoint
from rollout_service.rewards import Scorer
from rollout_service.rewards.judges import Judges
from rollout_service.sandbox.pool import WorkerPool
from rollout_service.sandbox.work import Work


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Attributes:
    scores: Of the answers that could be scored.
    failures: Why the others could not: they count for nothing, and not as 0.
    """

    scores: tuple[float, ...]
    failures: tuple[str, ...]

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)


async def evaluate(config: Config, server: EndpointConfig, samples: int = 1) -> Evaluation:
    """Asks the server for `samples` answers to each held-out problem, and scores them.

    Raises:
        ConfigError: the run holds no problems out, or is not scored by a reward function; or the
            server does not let the key in.
        DeadlineError: the server is away.
        InfrastructureError: no answer at all could be scored.
    """
    if config.task.environment is not None or config.task.agent is not None:
        raise ConfigError(
            "task.environment and task.agent act in sessions of a node's gateway; only runs with "
            "task.reward can be evaluated on another server"
        )
    if config.task.heldout == 0:
        raise ConfigError("task.heldout = 0: no problems to evaluate on; hold some out")
    tasks = Sampler(open_source(config), config).heldout("remote", samples=samples)
    async with (
        Endpoint("server", server) as endpoint,
        Judges(config.task.judges) as judges,
        WorkerPool(Work.of(config.task), judges) as workers,
    ):
        rewards = Scorer(workers)
        await endpoint.check()

        async def answer(task: Task) -> float | str:
            try:
                reply = await endpoint.ask(
                    "/chat/completions",
                    {
                        "messages": list(map(dict, task.messages)),
                        "max_tokens": task.sampling.max_new_tokens,
                        "temperature": task.sampling.temperature,
                        "top_p": task.sampling.top_p,
                    },
                )
                text = str(reply["choices"][0]["message"].get("content") or "")
                return await rewards.score(text, task.columns)
            except (EngineError, InfrastructureError, RewardError) as error:
                return f"{task.task_id}: {error}"

        results = await asyncio.gather(*(answer(t) for t in tasks for _ in range(samples)))
    scores = tuple(result for result in results if isinstance(result, float))
    failures = tuple(result for result in results if isinstance(result, str))
    if not scores:
        raise InfrastructureError(
            f"none of {len(failures)} answers could be scored; first: {failures[0]}"
        )
    return Evaluation(scores, failures)
