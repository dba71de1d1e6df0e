"""What a finished run leaves behind for people: summary.json and curves.png."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from leeway import report_html
from leeway.progress import MetricsFile
from leeway.v1 import queue_pb2

# Rewards at both ends of a run are means over so many steps.
_END_STEPS = 5


def summarize(
    rows: Sequence[Mapping[str, Any]],
    status: queue_pb2.StatusResponse,
    cpu_seconds: float,
    wall_seconds: float,
) -> dict[str, Any]:
    """The figures of one run.

    Args:
        rows: Of metrics.jsonl.
        status: Of the queue, after the last commit.

    Returns:
        `lost`: groups that the queue cannot account for, or that it took as committed although the
        trainer did not train on them. `twice`: groups that entered more than one optimizer step.
    """
    steps = [row for row in rows if row["kind"] == "step"]
    evals = {row["phase"]: row["reward_mean"] for row in rows if row["kind"] == "eval"}
    trained = Counter(task for row in steps for task in row["tasks"])
    rewards = [row["reward_mean"] for row in steps]
    groups = dict(status.groups)
    unaccounted = status.enqueued - sum(groups.values())
    untrained = max(0, groups.get("committed", 0) - len(trained))
    return {
        "steps": len(steps),
        "versions": steps[-1]["version"] if steps else 0,
        "reward_first5": _mean(rewards[:_END_STEPS]),
        "reward_last5": _mean(rewards[-_END_STEPS:]),
        "heldout_before": evals.get("before"),
        "heldout_after": evals.get("after"),
        "staleness_max": max((row["staleness_max"] for row in steps), default=0),
        "staleness_mean": _mean([row["staleness_mean"] for row in steps]),
        "tokens_trained": sum(row["tokens_trained"] for row in steps),
        "lost": abs(unaccounted) + untrained,
        "twice": sum(count - 1 for count in trained.values()),
        "groups": groups,
        "cpu_seconds": round(cpu_seconds, 1),
        "wall_seconds": round(wall_seconds, 1),
    }


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; of a step that a resumed run did again, the last."""
    rows: dict[tuple[str, Any], dict[str, Any]] = {}
    for row in MetricsFile(run / "metrics.jsonl").new_rows():
        rows[row["kind"], row["step"] if row["kind"] == "step" else row["phase"]] = row
    return list(rows.values())


def draw(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """The run's curves as a PNG: reward, answer length, staleness, and where the time went."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [row for row in rows if row["kind"] == "step"]
    at = [row["step"] for row in steps]
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    figure.suptitle(title)
    (reward, length), (staleness, time) = axes

    reward.plot(at, [row["reward_mean"] for row in steps], color="tab:green", label="training")
    for row in rows:
        if row["kind"] == "eval":
            x = at[0] - 1 if row["phase"] == "before" and at else (at[-1] if at else 0)
            reward.plot(x, row["reward_mean"], "D", color="tab:purple")
            reward.annotate(
                f"held out, {row['phase']}: {row['reward_mean']:.2f}",
                (x, row["reward_mean"]),
                textcoords="offset points",
                xytext=(6, 6) if row["phase"] == "before" else (-6, -14),
                ha="left" if row["phase"] == "before" else "right",
            )
    reward.set(ylabel="mean reward", ylim=(-0.02, 1.05))
    length.plot(at, [row["answer_tokens_mean"] for row in steps], color="tab:blue")
    length.set(ylabel="mean answer (tokens)", ylim=(0, None))
    staleness.plot(at, [row["staleness_mean"] for row in steps], color="tab:red", label="mean")
    staleness.plot(at, [row["staleness_max"] for row in steps], ":", color="tab:red", label="max")
    staleness.set(ylabel="staleness (versions)", xlabel="step", ylim=(-0.1, None))
    staleness.legend()
    time.stackplot(
        at,
        [row["step_seconds"] for row in steps],
        [row["wait_seconds"] for row in steps],
        labels=["training", "waiting for a batch"],
        colors=["tab:gray", "tab:orange"],
    )
    time.set(ylabel="trainer's seconds a step", xlabel="step", ylim=(0, None))
    time.legend()
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(run: Path, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes summary.json, report.html and, where matplotlib is installed, curves.png."""
    (run / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (run / "report.html").write_text(report_html.page(run.name, summary, rows))
    try:
        draw(rows, run / "curves.png", f"leeway: {run.name}")
    except ImportError:
        print("curves.png needs matplotlib: pip install 'leeway[quickstart]'")


def show(summary: Mapping[str, Any], run: Path, console: Console) -> None:
    """Prints the summary and where to look next."""

    def line(name: str, value: object) -> None:
        console.print(f"  {name:<22}{value}", highlight=False)

    def change(first: float | None, last: float | None) -> str:
        return " -> ".join("-" if value is None else f"{value:.3f}" for value in (first, last))

    console.print(f"Finished: {summary['steps']} steps in {summary['wall_seconds']:.0f} s.")
    line("reward, training", change(summary["reward_first5"], summary["reward_last5"]))
    line("reward, held out", change(summary["heldout_before"], summary["heldout_after"]))
    line("staleness", f"mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']}")
    line("CPU time", f"{summary['cpu_seconds']:.0f} s")
    line("lost / trained twice", f"{summary['lost']} / {summary['twice']}")
    line("report", run / "report.html")
    line("curves", run / "curves.png")
    line("model", run / "checkpoints" / "export")
    line("everything else", run)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
