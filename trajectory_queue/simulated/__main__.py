"""See the package's docstring."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path

from leeway import config as configuration
from trajectory_queue.simulated import Speed, run_fleet, run_trainer


async def _main(arguments: argparse.Namespace) -> None:
    config = configuration.load(arguments.config)
    speed = Speed(tokens_per_second=arguments.tokens_per_second)
    if arguments.side == "trainer":
        learned = await run_trainer(
            config,
            tasks=lambda: int(arguments.tasks),
            step_seconds=lambda _: float(arguments.step_seconds),
        )
        print(json.dumps({"versions": learned.version, "over_budget": learned.over_budget}))
        return
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_fleet(config, arguments.nodes, arguments.name, speed, stop)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A simulated fleet or trainer on a real queue.")
    parser.add_argument("side", choices=["fleet", "trainer"])
    parser.add_argument("config", type=Path)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--name", default="simulated")
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--tokens-per-second", type=float, default=100.0)
    asyncio.run(_main(parser.parse_args()))
