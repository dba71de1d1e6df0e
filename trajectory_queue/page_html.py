"""The queue's page as HTML: what `leeway top` shows, with history, and nothing from elsewhere.

A small script puts a fresh `<main>` in place of the old one every few seconds, and keeps what is
open and what has the focus; without it, or when paused, the page is as it was at its loading.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from leeway import panels
from leeway.figures import STYLE, Chart, figure
from leeway.report_html import CHARTS
from trajectory_queue.history import View

_STALE_SECONDS = 10.0

_OVER_TIME = (
    Chart("Tokens a second", [("pushed", "pushed"), ("trained", "trained")], "minute"),
    Chart("Groups outstanding", [("outstanding", "outstanding"), ("most", "capacity")], "minute"),
    Chart("Groups by place", [("running", "running"), ("queued", "queued")], "minute"),
    Chart("Nodes", [("seen", "nodes"), ("waiting", "idle_nodes")], "minute"),
    Chart("Trainer waits (seconds)", [("for its batch", "trainer_waiting")], "minute"),
    Chart("Budget (versions)", [("budget", "budget")], "minute"),
)

_OWN_STYLE = """
section { min-width: 0; } section ul { list-style: none; padding: 0; margin: 0; }
section ul, td, th { overflow-wrap: anywhere; } .wide { grid-column: 1 / -1; }
h2 { font-size: 1.1rem; margin: 0 0 .3rem; } td { text-align: left; }
button { font: inherit; color: inherit; background: none; border: 1px solid var(--line);
  border-radius: .3rem; padding: .3rem .8rem; cursor: pointer; }
"""

_SCRIPT = """
'use strict';
const button = document.getElementById('pause'), said = document.getElementById('said');
let paused = false;
button.addEventListener('click', () => {
  paused = !paused;
  button.setAttribute('aria-pressed', String(paused));
});
async function refresh() {
  try {
    const answer = await fetch('live', {cache: 'no-store', signal: AbortSignal.timeout(10000)});
    if (answer.status === 401) { location.reload(); return; }
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = await answer.text(), main = document.querySelector('main');
    if (paused) return;
    const open = [...main.querySelectorAll('details[open]')].map(one => one.id);
    const scrolled = [...main.querySelectorAll('.scroll')].map(one => [one.id, one.scrollLeft]);
    const focused = main.contains(document.activeElement) ? document.activeElement.id : '';
    main.innerHTML = fresh;
    for (const id of open) document.getElementById(id)?.setAttribute('open', '');
    for (const [id, left] of scrolled) {
      const found = document.getElementById(id);
      if (found) found.scrollLeft = left;
    }
    if (focused) document.getElementById(focused)?.focus({preventScroll: true});
    said.textContent = '';
  } catch (error) {
    said.textContent = 'The queue does not answer: ' + error.message;
  }
}
setInterval(() => { if (!paused) refresh(); }, REFRESH_MS);
"""
_REFRESH_MS = 3000


def page(run: str, view: View) -> str:
    title = html.escape(f"Leeway: {run}")
    script = _SCRIPT.replace("REFRESH_MS", str(_REFRESH_MS))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{_OWN_STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        '<p><button id="pause" aria-pressed="false">Pause updates</button> '
        '<span id="said" role="status"></span></p>\n'
        f"<main>{live(view)}</main>\n<script>{script}</script></body></html>\n"
    )


def live(view: View) -> str:
    """What changes, as the content of `<main>`."""
    if view.status is None:
        return "<p>The queue has not been read yet.</p>"
    newest = view.steps[-1] if view.steps else {}
    parts = [
        _list("Who waits for whom", panels.waits(view.status, view.pushed_per_second)),
        _list("Staleness", panels.staleness(view.status, newest)),
        _list("Newest step", panels.trainer(newest)),
        _list("Newest changes", panels.changes(view.changes)),
        _table("Nodes", panels.NODE_COLUMNS, panels.nodes(view.status)),
        *(figure(chart, view.samples) for chart in _OVER_TIME),
        *(figure(chart, view.steps) for chart in CHARTS),
    ]
    if view.age_seconds > _STALE_SECONDS:
        parts.insert(0, f'<p class="wide">Redis was last read {view.age_seconds:.0f} s ago.</p>')
    return "\n".join(parts)


def _list(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<section><h2>{title}</h2><ul>{items}</ul></section>"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<section class="wide"><h2>{title}</h2><div class="scroll" id="nodes" tabindex="0" '
        f'role="region" aria-label="{title}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )
