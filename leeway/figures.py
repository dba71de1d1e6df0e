"""Charts as inline SVG with the same numbers as tables beneath, for readers and screen readers.

The style follows the reader's light or dark setting and fits a phone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WIDTH, _HEIGHT, _MARGIN = 480, 200, 40
# Colour, dashes, and where the legend begins: told apart without colours as well.
_LINES = (("var(--first)", "none", _MARGIN), ("var(--second)", "5 3", _MARGIN + 180))

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d0d4da;
  --first: #1769c2; --second: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --paper: #16181b; --line: #3a3f46;
  --first: #6cb1ff; --second: #ff9d66; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 68rem; margin: 0 auto; padding: 1rem; }
main { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
summary { cursor: pointer; } :focus-visible { outline: 3px solid var(--first); }
text { fill: var(--ink); font-size: 12px; }
"""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the rows' `axis`; `series`: what the legend says, and the metric's name."""

    title: str
    series: Sequence[tuple[str, str]]
    axis: str = "step"


def figure(chart: Chart, rows: Sequence[Mapping[str, Any]]) -> str:
    """The chart and its table as HTML; empty when no row holds its metrics."""
    series = [
        (label, [(row[chart.axis], float(row[name])) for row in rows if name in row])
        for label, name in chart.series
    ]
    series = [(label, points) for label, points in series if points]
    if not series:
        return ""
    highest = max(max(value for _, value in points) for _, points in series)
    lowest = min(0.0, *(min(value for _, value in points) for _, points in series))
    first = min(points[0][0] for _, points in series)
    last = max(points[-1][0] for _, points in series)

    def place(step: float, value: float) -> str:
        x = _MARGIN + (step - first) / max(last - first, 1e-12) * (_WIDTH - 2 * _MARGIN)
        y = _HEIGHT - 24 - (value - lowest) / max(highest - lowest, 1e-12) * (_HEIGHT - 44)
        return f"{x:.1f},{y:.1f}"

    lines = "".join(
        f'<polyline fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}" '
        f'points="{" ".join(place(*point) for point in points)}"/>'
        f'<text x="{left}" y="14" style="fill:{colour}">{html.escape(label)}</text>'
        for (label, points), (colour, dashes, left) in zip(series, _LINES, strict=False)
    )
    axis = html.escape(chart.axis)
    scale = (
        f'<text x="2" y="30">{highest:.3g}</text><text x="2" y="{_HEIGHT - 22}">{lowest:.3g}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT - 4}">{axis} {first:g}</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 4}" text-anchor="end">{last:g}</text>'
    )
    title = html.escape(chart.title)
    return (
        f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{title}, over {len(rows)} rows">{scale}{lines}</svg>'
        f"{_table(title, chart.axis, series)}</figure>\n"
    )


def _table(
    title: str, axis: str, series: Sequence[tuple[str, Sequence[tuple[float, float]]]]
) -> str:
    by_step: dict[float, dict[str, float]] = {}
    for label, points in series:
        for step, value in points:
            by_step.setdefault(step, {})[label] = value
    head = "".join(f'<th scope="col">{html.escape(label)}</th>' for label, _ in series)
    body = "".join(
        f'<tr><th scope="row">{step:g}</th>'
        + "".join(f"<td>{number(values.get(label))}</td>" for label, _ in series)
        + "</tr>"
        for step, values in sorted(by_step.items())
    )
    name = re.sub(r"[^a-z]+", "-", f"{title} {axis}".lower())
    return (
        f'<details id="{name}"><summary id="{name}-summary">Numbers: {title}</summary>'
        f'<div class="scroll" id="{name}-table" tabindex="0" role="region" aria-label="{title}">'
        f'<table><tr><th scope="col">{html.escape(axis)}</th>{head}</tr>{body}</table>'
        "</div></details>"
    )


def number(value: Any) -> str:
    """A table's cell, as HTML."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))
