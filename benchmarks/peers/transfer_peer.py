"""CPU-milliseconds a group through TransferQueue's key-value interface: put, get and clear.

Runs in an environment that holds TransferQueue (0.1.11, `pip install torch TransferQueue`), not in
ours. Prints one number: all processes of its Ray are counted, less what they take when idle.

    python transfer_peer.py GROUP_SIZE TOKENS
"""

from __future__ import annotations

import sys
import time

import psutil
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

# As our side's pushes and batches.
BATCH, BATCHES = 64, 8
IDLE_SECONDS = 5.0
PARTITION = "train"


def main(group_size: int, tokens: int) -> float:
    # Its actors ask for a CPU each.
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=64)
    tq.init()
    try:
        _pass(0, group_size, tokens)
        # Ray's own processes never rest.
        before, started = _cpu(), time.monotonic()
        time.sleep(IDLE_SECONDS)
        idle = (_cpu() - before) / (time.monotonic() - started)
        before, started = _cpu(), time.monotonic()
        for number in range(1, BATCHES + 1):
            _pass(number, group_size, tokens)
        cpu = _cpu() - before - idle * (time.monotonic() - started)
        return 1000 * cpu / (BATCH * BATCHES)
    finally:
        tq.close()
        ray.shutdown()


def _pass(number: int, group_size: int, tokens: int) -> None:
    rows = BATCH * group_size
    keys = [f"{number}_{row}" for row in range(rows)]
    fields = TensorDict(
        {
            "token_ids": torch.randint(0, 49152, (rows, tokens + 32), dtype=torch.int32),
            "logprobs": -torch.rand(rows, tokens),
            "loss_mask": torch.ones(rows, tokens, dtype=torch.uint8),
        },
        batch_size=rows,
    )
    tags = [{"model_version": number} for _ in keys]
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields, tags=tags)
    found = tq.kv_batch_get(keys=keys, partition_id=PARTITION)
    if len(found) != rows:
        raise RuntimeError(f"{len(found)} of {rows} trajectories came back")
    tq.kv_clear(keys=keys, partition_id=PARTITION)


def _cpu() -> float:
    """CPU-seconds of this process and of all that it has started."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2])))
