"""A finished run as one HTML page that needs nothing else: runs/<name>/report.html."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from leeway.figures import STYLE, Chart, figure, number

CHARTS = (
    Chart("Mean reward", [("reward", "reward_mean")]),
    Chart("Tokens a second", [("trained batch", "tokens_per_second")]),
    Chart("Staleness (versions)", [("mean", "staleness_mean"), ("budget", "staleness_budget")]),
    Chart("Trainer's seconds a step", [("learning", "step_seconds"), ("waiting", "wait_seconds")]),
    Chart(
        "Staleness by where it grew (versions)",
        [("in flight", "staleness_in_flight_mean"), ("in queue", "staleness_in_queue_mean")],
    ),
    Chart(
        "Off-policy health",
        [("effective sample size", "effective_sample_size"), ("clip fraction", "clip_fraction")],
    ),
)


def page(name: str, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole page. A chart of which no step holds a metric is left out."""
    steps = [row for row in rows if row["kind"] == "step"]
    charts = [figure(chart, steps) for chart in CHARTS]
    title = html.escape(f"Leeway: {name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        f"{_summary(summary)}\n<main>\n{''.join(charts)}</main>\n</body></html>\n"
    )


def _summary(summary: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in summary.items() if not isinstance(value, dict)}
    cells = "".join(
        f'<tr><th scope="row">{html.escape(key)}</th><td>{number(value)}</td></tr>'
        for key, value in plain.items()
    )
    return f'<div class="scroll"><table><caption>Summary</caption>{cells}</table></div>'
