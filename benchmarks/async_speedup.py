"""What never waiting is worth: the real queue service, engines and a trainer that only take time.

Two profiles of `leeway plan`, scaled down in tokens and seconds so that a machine without an
accelerator can play them: long-tailed answers (AReaL's batches), and episodes of several turns with
a tool in between. Each runs synchronously (a budget of 0) and asynchronously over a queue service
with its own Valkey, each with its GPUs split as `leeway plan` finds best for it.

    speedup_long_tail, speedup_tools  throughput over the synchronous run's
    trainer_busy                      share of its time in which the trainer learned; the lower of
                                      both profiles
    to_bound                          throughput over the bound: no admission rule can train faster
                                      than the trainer steps or than the fleet generates; the lower

    python -m benchmarks.async_speedup [--cases long_tail tools] [--steps 16] [--short]
                                       [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import finish
from benchmarks.played import measure, play
from trajectory_queue.plan.profile import Profile, load
from trajectory_queue.plan.questions import best, bound, splits


@dataclass(frozen=True, slots=True)
class Case:
    """A profile, and by how much it is scaled down.

    Attributes:
        batch_groups, group_size: Of the benchmark; the step stays as long as the profile's, and so
            does the balance of both sides.
        tokens, seconds: One of the benchmark stands for so many of the profile.
        gpus_per_node: A rollout node is one engine.
        budget: Of the asynchronous run.
    """

    profile: str
    batch_groups: int
    group_size: int
    tokens: float
    seconds: float
    gpus_per_node: int
    budget: int = 4


CASES = {
    "long_tail": Case("areal-math-1.5b", 16, 4, tokens=100.0, seconds=25.0, gpus_per_node=8),
    # Whole batches, and steps of 10 s: what a batch costs the queue is scaled down with neither.
    "tools": Case("tools", 64, 8, tokens=100.0, seconds=12.5, gpus_per_node=2),
}
GPUS = 64
# Of the splits in which the trainer hardly waits, the fastest.
LEAST_BUSY = 0.98


def miniature(case: Case) -> Profile:
    """The profile in the benchmark's tokens and seconds, on 64 GPUs."""
    whole = load(case.profile)
    rollouts, trainer = whole.rollouts, whole.trainer
    lengths, tools = rollouts.answer_tokens, rollouts.tool_seconds
    samples = case.batch_groups * case.group_size
    # A GPU of the benchmark stands for so many of the profile, by the samples that it works on.
    gpu = whole.gpus / GPUS * samples / whole.batch_samples
    slots = rollouts.concurrency / rollouts.gpus_per_node * gpu * case.gpus_per_node
    # Whole groups, as on the large nodes of the profile nearly all slots can be used.
    concurrency = math.ceil(slots / case.group_size) * case.group_size
    slowdown = rollouts.slowdown * (rollouts.concurrency - 1) / max(concurrency - 1, 1)
    return whole.where(
        **{
            "batch_groups": case.batch_groups,
            "group_size": case.group_size,
            "budget": case.budget,
            "rollouts.nodes": GPUS // case.gpus_per_node // 2,
            "rollouts.gpus_per_node": case.gpus_per_node,
            "rollouts.concurrency": concurrency,
            "rollouts.slowdown": slowdown,
            "rollouts.answer_tokens.median": lengths.median / case.tokens,
            "rollouts.answer_tokens.longest": (lengths.longest or 1e9) / case.tokens,
            "rollouts.token_seconds": rollouts.token_seconds * case.tokens / case.seconds,
            "rollouts.tool_seconds.median": tools.median / case.seconds,
            "rollouts.tool_seconds.longest": (tools.longest or 1e9) / case.seconds,
            "rollouts.update_seconds": rollouts.update_seconds / case.seconds,
            "rollouts.pause_seconds": 0.0,
            "trainer.gpus": GPUS / 2,
            "trainer.token_seconds": trainer.token_seconds * case.tokens / case.seconds / gpu,
        }
    )


def compare(case: Case, directory: Path, steps: int, seed: int) -> dict[str, float]:
    small = miniature(case)
    print(f"{case.profile}: {GPUS} GPUs, rollouts : trainer", flush=True)
    figures, profiles = {}, {}
    for eta, own_steps in ((0, 3 + steps // 2), (case.budget, steps + 2 * case.budget + 2)):
        name = f"{case.profile.replace('.', '-')}-eta{eta}"
        choices = splits(small.where(budget=eta), steps=40)
        if eta:
            choices = [a for a in choices if a.outcome.trainer_busy >= LEAST_BUSY]
        profiles[eta] = best(choices).profile
        started = time.monotonic()
        rows = asyncio.run(play(profiles[eta], directory, name, own_steps, seed))
        figures[eta] = measure(rows, eta)
        print(
            f"  eta {eta}, {best(choices).setting}: {figures[eta]}, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    stale, sync = figures[case.budget], figures[0]
    most = bound(profiles[case.budget])
    print(f"  bound: {most}")
    return {
        "speedup": stale.tokens_per_second / sync.tokens_per_second,
        "busy": stale.trainer_busy,
        "to_bound": stale.tokens_per_second / most.tokens_per_second,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=16, help="more make the slow side surer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="a quick, smaller form")
    parser.add_argument("--keep", type=Path, help="leave the runs here, for `leeway plan --from`")
    arguments = parser.parse_args()
    steps = 6 if arguments.short else arguments.steps
    with tempfile.TemporaryDirectory(prefix="leeway-bench-") as temporary:
        directory = arguments.keep or Path(temporary)
        results = {
            name: compare(CASES[name], directory, steps, arguments.seed) for name in arguments.cases
        }
    finish(
        arguments.seed,
        steps=steps,
        **{f"speedup_{name}": round(result["speedup"], 2) for name, result in results.items()},
        trainer_busy=round(min(result["busy"] for result in results.values()), 4),
        to_bound=round(min(result["to_bound"] for result in results.values()), 4),
    )


if __name__ == "__main__":
    main()
