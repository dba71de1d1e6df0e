"""CPU-milliseconds a group through the Atropos API server: put and get, all processes counted.

Runs in an environment that holds atroposlib (0.4.0: `pip install --no-deps atroposlib`, then
fastapi, uvicorn, pydantic, aiohttp, numpy, redis, jinja2, tenacity, requests, psutil, orjson,
zstandard), not in ours. Prints one number. Its wire is JSON; the groups are ours, as lists.

    python atropos_peer.py GROUP_SIZE TOKENS
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import numpy as np
import psutil
import requests

BATCH, BATCHES = 16, 4


def main(group_size: int, tokens: int) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "atroposlib.api.server:app", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return _measure(f"http://127.0.0.1:{port}", server, group_size, tokens)
    finally:
        server.terminate()
        server.wait()


def _measure(url: str, server: subprocess.Popen[bytes], group_size: int, tokens: int) -> float:
    session = requests.Session()
    _await(session, url)
    registration = {
        "wandb_group": "g",
        "wandb_project": "p",
        "batch_size": BATCH * group_size,
        "max_token_len": tokens + 32,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 1000,
    }
    session.post(f"{url}/register", json=registration).raise_for_status()
    rng = np.random.default_rng(tokens)
    group = {
        "tokens": rng.integers(0, 49152, (group_size, tokens + 32)).tolist(),
        "masks": np.ones((group_size, tokens + 32), dtype=int).tolist(),
        "inference_logprobs": (-rng.exponential(1.0, (group_size, tokens + 32))).tolist(),
        "scores": [float(index) for index in range(group_size)],
    }
    _pass(session, url, group)
    before = _cpu(server)
    for _ in range(BATCHES):
        _pass(session, url, group)
    return 1000 * (_cpu(server) - before) / (BATCH * BATCHES)


def _pass(session: requests.Session, url: str, group: dict[str, object]) -> None:
    for _ in range(BATCH):
        session.post(f"{url}/scored_data", json=group).raise_for_status()
    batch = session.get(f"{url}/batch").json()["batch"]
    if len(batch) != BATCH:
        raise RuntimeError(f"{len(batch)} of {BATCH} groups came back")


def _await(session: requests.Session, url: str) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            session.get(url).raise_for_status()
            return
        except requests.ConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _cpu(server: subprocess.Popen[bytes]) -> float:
    times = psutil.Process(server.pid).cpu_times()
    return time.process_time() + times.user + times.system


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2])))
