"""Builds a rollout node out of a configuration: what `leeway rollout` runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from leeway import models, rpc
from leeway.config import Config
from leeway.telemetry import Spans
from rollout_service.engines.choose import open_engine
from rollout_service.engines.stored_weights import load_weights
from rollout_service.node import RolloutNode
from rollout_service.receiver import PolicyReceiver
from rollout_service.relay import relaying
from rollout_service.workflows.choose import open_workflow
from trajectory_queue.client import RolloutQueue


def _tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


async def serve(config: Config, node_id: str, *, stop: asyncio.Event) -> None:
    """Rolls out tasks until the run is finished or `stop` is set.

    Raises:
        ConfigError: the configuration, the reward function or the model cannot work.
        LeewayError: the queue or the broadcast stayed away.
    """
    model = await asyncio.to_thread(models.resolve, config.model.path)
    tokenizer = await asyncio.to_thread(_tokenizer, model)
    spans = Spans(config.run.path / f"spans-{node_id}.jsonl" if config.telemetry.spans else None)
    queue_address, largest = config.queue.address, config.queue.max_message_bytes
    try:
        async with (
            rpc.connect(queue_address, config.security, largest) as queue_channel,
            rpc.connect(config.weights.address, config.security) as weights_channel,
            relaying(config.weights, config.security) as relay,
            open_engine(config, model, node_id) as engine,
            open_workflow(config, engine, tokenizer, node_id) as workflow,
        ):
            receiver = PolicyReceiver(
                weights_channel,
                engine,
                node_id=node_id,
                run_id=config.run.name,
                mode=config.rollout.update_mode,
                config=config.weights,
                initial=await asyncio.to_thread(load_weights, model),
                relay=relay,
            )
            node = RolloutNode(
                config,
                node_id,
                engine,
                RolloutQueue(queue_channel, node_id),
                receiver,
                workflow,
                spans,
            )
            await node.run(stop)
    finally:
        spans.close()
