"""Builds a trainer out of a configuration: what `leeway trainer` runs."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from transformers import AutoConfig

from leeway import models, rpc
from leeway.config import Config
from leeway.errors import ConfigError
from leeway.tasks import Sampler, open_source
from leeway.telemetry import Spans
from trainer_service import launch
from trainer_service.canary import CanaryText
from trainer_service.checkpoint import Checkpoints, export_critic, export_hf, model_hash
from trainer_service.learners import CRITIC, Learners
from trainer_service.loop import Trainer
from trainer_service.record import Record
from trainer_service.trackers.choose import open_trackers
from trainer_service.weight_broadcast.publisher import WeightPublisher
from trajectory_queue.client import TrainerQueue


async def serve(config: Config, *, stop: asyncio.Event) -> None:
    """Trains until the run is finished or `stop` is set; a rank that does not lead, until its
    leader lets it go.

    Raises:
        ConfigError: the configuration, the data or the model cannot work.
        LeewayError: the queue or the broadcast stayed away, or a newer life has taken over.
    """
    model = await asyncio.to_thread(models.resolve, config.model.path)
    reference = None
    if config.trainer.algorithm.needs_reference:
        reference = await asyncio.to_thread(
            models.resolve, config.trainer.reference or config.model.path
        )
    critic = None
    if config.trainer.algorithm.advantage.needs_critic:
        critic = await asyncio.to_thread(_critic, config, model)
    with ExitStack() as stack:
        opening = launch.learners(config.trainer, model, reference, critic)
        learners = await asyncio.to_thread(stack.enter_context, opening)
        if learners is not None:
            await _lead(config, model, critic, learners, stop)


async def _lead(
    config: Config, model: Path, critic: Path | None, learners: Learners, stop: asyncio.Event
) -> None:
    run = config.run.path
    run.mkdir(parents=True, exist_ok=True)
    sampler = Sampler(await asyncio.to_thread(open_source, config), config)
    checkpoints = Checkpoints(
        run / "checkpoints",
        run_id=config.run.name,
        model_hash=await asyncio.to_thread(model_hash, model),
        kept=config.trainer.checkpoints_kept,
    )
    channel = rpc.connect(config.queue.address, config.security, config.queue.max_message_bytes)
    record = Record(run, open_trackers(config))
    spans = Spans(run / "spans-trainer.jsonl" if config.telemetry.spans else None)

    def start_publisher(incarnation: int) -> WeightPublisher:
        return WeightPublisher(
            config.run.name, incarnation, config.weights, config.security, config.telemetry
        )

    trainer = Trainer(
        config,
        learners,
        sampler,
        TrainerQueue(channel, "trainer", await asyncio.to_thread(_vocabulary, model)),
        start_publisher,
        await asyncio.to_thread(CanaryText, model, config.weights),
        checkpoints,
        record,
        spans,
    )
    try:
        await trainer.run(stop)
        newest = checkpoints.latest()
        if newest is not None and not stop.is_set():
            await asyncio.to_thread(
                export_hf,
                newest.path,
                model,
                run / "checkpoints" / "export",
                lora_alpha=config.trainer.lora_alpha,
            )
            if critic is not None:
                out = run / "checkpoints" / CRITIC
                await asyncio.to_thread(export_critic, newest.path, critic, out)
    finally:
        record.close()
        spans.close()
        await channel.close()


def _critic(config: Config, model: Path) -> Path:
    """Where the critic's first weights lie.

    Raises:
        ConfigError: It knows other tokens than the policy.
    """
    critic = models.resolve(config.trainer.critic.model or config.model.path)
    own, policy = _vocabulary(critic), _vocabulary(model)
    if own != policy:
        raise ConfigError(
            f"trainer.critic.model = {config.trainer.critic.model!r}: it knows {own} tokens, the "
            f"policy {policy}; use a model with the same tokenizer"
        )
    return critic


def _vocabulary(model: Path) -> int:
    """How many token ids a model directory's model knows."""
    return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
