"""A trainer that stops keeps what it has learned; one that resumes replays what the queue gives
back, and hands out what is new to nodes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from leeway import rpc
from leeway.algorithm import AdvantageConfig, AlgorithmConfig, Baseline, Normalise
from leeway.config import (
    Config,
    ModelConfig,
    QueueConfig,
    RunConfig,
    SamplingConfig,
    StalenessConfig,
    TaskConfig,
    TrainerConfig,
)
from leeway.errors import ConfigError
from leeway.tasks import Sampler, open_source
from leeway.telemetry import Spans
from leeway.trajectory import FinishReason, Trajectory
from leeway.versions import VersionSpan
from tests import tiny
from tests.queue.cases import serving
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.canary import CanaryText, scored_whole
from trainer_service.checkpoint import Checkpoints
from trainer_service.learners import Learners
from trainer_service.loop import Trainer
from trainer_service.record import Record
from trainer_service.trackers.feed import Trackers
from trajectory_queue.client import Lease, RolloutQueue, TrainerQueue

BATCHES = 1.5
"""What the queue holds when the trainer comes back."""


class Published:
    """Stands where the weights leave for the nodes."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def __enter__(self) -> Published:
        return self

    def __exit__(self, *_: object) -> None: ...

    def publish(self, version: int, weights: Iterable[Any], canary: object) -> None:
        self.versions.append(version)


def configured(directory: Path, release: str) -> Config:
    rows = [{"prompt": f"say {c}", "answer": c} for c in "abcdefgh"]
    (directory / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    advantage = AdvantageConfig(baseline=Baseline.NONE, normalise=Normalise.BATCH)
    return Config(
        run=RunConfig(name="resumed", directory=directory / "runs"),
        model=ModelConfig(path=str(tiny.build(directory / "model"))),
        task=TaskConfig(jsonl=directory / "rows.jsonl", reward="unused:unused"),
        sampling=SamplingConfig(group_size=4, max_new_tokens=3),
        staleness=StalenessConfig(budget=1),
        queue=QueueConfig(group_release=release, filter_equal_scores=False),  # type: ignore[arg-type]
        trainer=TrainerConfig(
            batch_groups=2,
            steps=1,
            batch_seconds=30.0,
            algorithm=AlgorithmConfig(advantage=advantage),
        ),
    )


def answered(lease: Lease, backend: TorchBackend, version: int, off_by: float) -> list[Trajectory]:
    """The lease's answers; their log-probabilities are off by so many nats from the trainer's."""
    found = []
    for index in range(lease.task.group_size):
        ids = np.array([5, 6, 7 + index, 8, 9 + index])
        (logprobs,) = backend.scores([scored_whole(ids)])
        found.append(
            Trajectory(
                trajectory_id=f"{lease.task.task_id}/{index}",
                task_id=lease.task.task_id,
                index=index,
                token_ids=ids.astype(np.int32),
                prompt_length=2,
                logprobs=logprobs[1:] - np.float32(off_by),
                loss_mask=np.ones(3, dtype=np.bool_),
                versions=(VersionSpan(version, 3),),
                finish_reason=FinishReason.LENGTH,
                sampling=lease.task.sampling,
                reward=float(index),
                score=float(index),
            )
        )
    return found


class Stopping(TorchBackend):
    """Is asked to end, by `ask`, in the middle of a call of the given name."""

    ask: Callable[[], None]
    call = ""

    def accumulate(self, microbatches: Sequence[Any], objective: Any) -> None:
        super().accumulate(microbatches, objective)
        if self.call == "accumulate":
            self.ask()

    def apply(self) -> Any:
        result = super().apply()
        if self.call == "apply":
            self.call = ""
            self.ask()
        return result


@asynccontextmanager
async def training(
    config: Config,
    backend: TorchBackend,
    directory: Path,
    batches: float,
    published: Published,
    *,
    version: int = 0,
    off_by: float = 0.0,
) -> AsyncIterator[tuple[Trainer, TrainerQueue]]:
    """A trainer, and a queue that holds answers of this version for so many batches."""
    model = Path(config.model.path)
    config.run.path.mkdir(parents=True)
    record = Record(config.run.path, Trackers({}))
    async with (
        serving(config) as address,
        rpc.connect(address, config.security, config.queue.max_message_bytes) as channel,
    ):
        queue = TrainerQueue(channel, "trainer", AutoConfig.from_pretrained(model).vocab_size)
        await queue.resume(version)
        groups = int(batches * config.queued_batch_groups)
        await queue.enqueue(Sampler(open_source(config), config).take(groups))
        node = RolloutQueue(channel, "node")
        leases = await node.lease_tasks(
            version=version, max_groups=groups, wait_seconds=5.0, request_id="all"
        )
        for lease in leases.leases:
            await node.push(lease.lease_id, answered(lease, backend, version, off_by))
        assert (await queue.status()).groups["queued"] == groups
        trainer = Trainer(
            config,
            Learners(backend),
            Sampler(open_source(config), config),
            queue,
            lambda _: published,  # type: ignore[arg-type, return-value]
            CanaryText(model, config.weights),
            checkpoints_of(directory),
            record,
            Spans(None),
        )
        yield trainer, queue
    record.close()


def checkpoints_of(directory: Path) -> Checkpoints:
    return Checkpoints(directory / "checkpoints", run_id="r", model_hash="m", kept=1)


@pytest.mark.parametrize("release", ["complete", "streaming"])
async def test_a_resumed_trainer_replays_no_more_batches_than_the_queue_has(
    release: str, tmp_path: Path
) -> None:
    """Nine versions were published, of which one whole batch can be trained again: version 1 must
    go out, or the nodes never generate for version 2."""
    config, published = configured(tmp_path, release), Published()
    backend = TorchBackend(Path(config.model.path), config.trainer)
    checkpoints_of(tmp_path).set_published(9)
    async with training(config, backend, tmp_path, BATCHES, published) as (trainer, _):
        await trainer.run(asyncio.Event())
    assert published.versions == [1]


@pytest.mark.parametrize("lives", [0, 1])
async def test_the_engine_is_judged_by_what_this_life_has_published(
    lives: int, tmp_path: Path
) -> None:
    """An earlier one, killed before it committed, may have come to the same version by another
    batch: what nodes answered with that says nothing about their engines."""
    config = configured(tmp_path, "complete")
    backend = TorchBackend(Path(config.model.path), config.trainer)
    if lives:
        async with training(config, backend, tmp_path, 1.0, Published()) as (trainer, _):
            await trainer.run(asyncio.Event())
    assert checkpoints_of(tmp_path).published == lives

    again = {
        "run": RunConfig(name="again", directory=config.run.directory),
        "trainer": config.trainer.model_copy(update={"steps": lives + 1}),
    }
    config, published = config.model_copy(update=again), Published()
    judged = training(config, backend, tmp_path, 1.0, published, version=lives, off_by=0.5)
    async with judged as (trainer, _):
        if lives:
            await trainer.run(asyncio.Event())
            assert published.versions == [1, 2]
        else:
            refused = pytest.RaisesExc(ConfigError, match="engine and trainer disagree")
            with pytest.RaisesGroup(refused):
                await trainer.run(asyncio.Event())


@pytest.mark.parametrize(("call", "version"), [("accumulate", 0), ("apply", 1)])
async def test_a_trainer_that_stops_saves_the_last_version_that_it_has_begun(
    call: str, version: int, tmp_path: Path
) -> None:
    """A gradient changes nothing; a batch that has changed weights is finished and committed, also
    by its second optimizer step."""
    config = configured(tmp_path, "complete")
    trainer_config = config.trainer.model_copy(update={"minibatches": 2, "lr": 1e-2})
    config = config.model_copy(update={"trainer": trainer_config})
    backend, stop = Stopping(Path(config.model.path), config.trainer), asyncio.Event()
    loop = asyncio.get_running_loop()
    saved, heard = checkpoints_of(tmp_path), threading.Event()

    def ask() -> None:
        loop.call_soon_threadsafe(stop.set)
        loop.call_soon_threadsafe(heard.set)
        assert heard.wait(30.0)
        # A gradient ends when all is over: otherwise the batch might begin to change weights.
        deadline = time.monotonic() + 30.0
        while call == "accumulate" and saved.latest() is None:
            assert time.monotonic() < deadline, "the stop waits for a gradient"
            time.sleep(0.01)

    backend.ask, backend.call = ask, call
    before = values(backend)
    async with training(config, backend, tmp_path, 1.0, Published()) as (trainer, queue):
        await trainer.run(stop)
        assert (await queue.status()).version == version
    latest = saved.latest()
    assert latest is not None and latest.extra["version"] == version
    after = TorchBackend(Path(config.model.path), config.trainer)
    Learners(after).load(latest.path)
    same = all(np.array_equal(before[name], tensor) for name, tensor in values(after).items())
    assert same == (version == 0)


def values(backend: TorchBackend) -> dict[str, Any]:
    return {name: tensor.copy() for name, tensor in backend.weights()}
