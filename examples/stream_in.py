"""Streams traffic that was served elsewhere into a running queue, over gRPC.

    python examples/stream_in.py run.yaml < traffic.jsonl

Each line is one conversation, with what was sampled as the engine returned it:

    {"id": "chat-17", "messages": [{"role": "user", "content": "..."}], "prompt_ids": [5, 9, ...],
     "answers": [{"token_ids": [...], "logprobs": [...], "version": 3, "finish": "stop",
                  "reward": 1.0}]}

`run.yaml` needs `queue.address` and, off loopback, `security` with the producer's token or
certificate. The number of answers is the run's group size, e.g. 1.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from leeway import config as configuration
from leeway import rpc
from leeway.trajectory import FinishReason, Task, Trajectory
from leeway.versions import VersionSpan
from trajectory_queue.producer import ProducerQueue


def trajectory(task: Task, row: dict[str, Any], index: int) -> Trajectory:
    prompt, answer = row["prompt_ids"], row["answers"][index]
    length = len(answer["token_ids"])
    return Trajectory(
        trajectory_id=f"{task.task_id}/{index}",
        task_id=task.task_id,
        index=index,
        token_ids=np.array(prompt + answer["token_ids"], dtype=np.int32),
        prompt_length=len(prompt),
        logprobs=np.array(answer["logprobs"], dtype=np.float32),
        loss_mask=np.ones(length, dtype=np.bool_),
        versions=(VersionSpan(answer["version"], length),),
        finish_reason=FinishReason[answer["finish"].upper()],
        sampling=task.sampling,
        reward=answer["reward"],
        score=answer["reward"],
    )


async def stream(queue: ProducerQueue, row: dict[str, Any]) -> str:
    """Says what became of the conversation."""
    version = min(answer["version"] for answer in row["answers"])
    while True:  # Each call waits for a place in the staleness budget; a restart begins anew.
        opened = await queue.open_task(row["id"], row["messages"], version=version)
        if opened.lease is not None:
            break
        if opened.known or opened.run_finished or opened.needs_version is not None:
            return f"left out: waits for {opened.waiting_for}"
    task = opened.lease.task
    async with queue.keeping(opened.lease, version):
        rollouts = [trajectory(task, row, index) for index in range(task.group_size)]
        pushed = await queue.push(opened.lease, rollouts)
    return "; ".join(refusal.message for refusal in pushed.refused) or "streamed in"


async def main(path: Path) -> None:
    config = configuration.load(path)
    async with rpc.connect(config.queue.address, config.security) as channel:
        queue = ProducerQueue(channel, "traffic")
        while line := await asyncio.to_thread(sys.stdin.readline):
            row = json.loads(line)
            print(row["id"], await stream(queue, row), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
