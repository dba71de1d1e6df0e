"""The examples that a new user starts from do what they say."""

from pathlib import Path

import pytest

from leeway import config
from leeway.tasks import Sampler, open_source
from rollout_service.rewards import Scorer
from rollout_service.sandbox.pool import WorkerPool
from rollout_service.sandbox.work import Work

ROOT = Path(__file__).parents[2]
JSONL = "task={jsonl: examples/addition.jsonl, heldout: 32, reward: %s}"


@pytest.mark.parametrize("overrides", [(), (JSONL % "examples/quickstart_reward.py:reward",)])
async def test_a_right_answer_scores_one_and_a_wrong_one_nothing(overrides, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = config.load(ROOT / "examples" / "quickstart.yaml", overrides)
    task = Sampler(open_source(settings), settings).task(0)
    async with WorkerPool(Work.of(settings.task)) as workers:
        rewards = Scorer(workers)
        right = f"7 of 9 is {task.columns['answer']}."
        assert await rewards.score(right, task.columns) == 1.0
        assert await rewards.score(f"{right} Or 99?", task.columns) == 0.0
        assert await rewards.score("I do not know.", task.columns) == 0.0
