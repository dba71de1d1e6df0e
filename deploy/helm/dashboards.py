"""The Grafana dashboards as data; `make charts` writes them as JSON.

Each panel is a title, a unit and its queries by legend. A test proves that every query names only
metrics that the code exports.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    queries: dict[str, str]
    """PromQL by legend."""
    description: str = ""


def _step(metric: str) -> str:
    return f'leeway_trainer{{metric="{metric}"}}'


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}[$__rate_interval]))"


def _total(counter: str) -> str:
    return f"sum(rate({counter}[$__rate_interval]))"


def _quantiles(histogram: str) -> dict[str, str]:
    rate = f"sum by (le) (rate({histogram}_bucket[$__rate_interval]))"
    return {f"p{round(q * 100)}": f"histogram_quantile({q}, {rate})" for q in (0.5, 0.9, 0.99)}


_OVERVIEW = [
    Panel(
        "Reward",
        "none",
        {"mean": _step("reward_mean"), "trained": _step("reward_trained_mean")},
        "Over everything generated; over what entered a step.",
    ),
    Panel(
        "Staleness of trained data",
        "none",
        {
            "mean": _step("staleness_mean"),
            "max": _step("staleness_max"),
            "in flight": _step("staleness_in_flight_mean"),
            "in queue": _step("staleness_in_queue_mean"),
            "budget": "max(leeway_queue_budget)",
        },
        "In policy versions. The maximum is never above the budget.",
    ),
    Panel(
        "Who waits for whom",
        "s",
        {
            "trainer, for a batch": _step("wait_seconds"),
            "trainer, learning": _step("step_seconds"),
            "trainer, publishing": _step("publish_seconds"),
        },
        "Seconds of the newest step. Waiting above a tenth of learning: add nodes.",
    ),
    Panel(
        "Nodes, standing still",
        "percentunit",
        {"{{what}}": f"{_rate('leeway_wait_seconds_total', 'what')}"},
        "Seconds a second, over all nodes, by what they wait for.",
    ),
    Panel("Throughput", "none", {"tokens/s": _step("tokens_per_second")}),
    Panel(
        "Off-policy health",
        "none",
        {
            "effective sample size": _step("effective_sample_size"),
            "KL of trainer and engine": _step("mismatch_kl_k3_mean"),
        },
        "The first stays above 0.5, the second below 0.001.",
    ),
    Panel("Policy version", "none", {"trainer": "max(leeway_queue_version)"}),
    Panel("Answers", "none", {"tokens": _step("answer_tokens_mean")}, "Mean length."),
]
_QUEUE = [
    Panel(
        "Groups by state",
        "none",
        {"{{state}}": 'max by (state) (leeway_queue_groups{lane="train",state!="committed"})'},
    ),
    Panel(
        "Outstanding and capacity",
        "none",
        {
            "outstanding": "max(leeway_queue_outstanding_groups)",
            "capacity": "max(leeway_queue_capacity_groups)",
        },
        "At capacity while the trainer waits: groups fill slowly, look at the nodes.",
    ),
    Panel(
        "Waiting",
        "s",
        {
            "trainer": "max(leeway_queue_trainer_waiting_seconds)",
            "oldest group": "max(leeway_queue_oldest_queued_seconds)",
        },
    ),
    Panel("Held", "bytes", {"payload": "max(leeway_queue_payload_bytes)"}),
    Panel(
        "What happens",
        "none",
        {"{{event}}": "max by (event) (rate(leeway_queue_events_total[$__rate_interval]))"},
        "A second, by event; docs/queue.md explains each.",
    ),
    Panel("Event loop lag", "s", _quantiles("leeway_queue_loop_lag_seconds")),
    Panel(
        "Refused calls",
        "none",
        {"{{reason}}": _rate("leeway_rpc_refused_total", "reason")},
        "No token, the wrong role, too large.",
    ),
    Panel("Lives of the trainer", "none", {"incarnation": "max(leeway_queue_incarnation)"}),
]
_WEIGHTS = [
    Panel(
        "Versions",
        "none",
        {
            "published": "max(leeway_weights_published_version)",
            "oldest node": "min(leeway_weights_version)",
        },
    ),
    Panel(
        "Lag of the nodes",
        "none",
        {
            "subscribed, worst": "max(leeway_weights_lag_versions_max)",
            "budget": "max(leeway_queue_budget)",
        },
    ),
    Panel(
        "Size",
        "bytes",
        {"delta": "max(leeway_weights_delta_bytes)", "full": "max(leeway_weights_full_bytes)"},
    ),
    Panel("Changed", "percentunit", {"elements": "max(leeway_weights_changed_ratio)"}),
    Panel(
        "Received",
        "Bps",
        {"{{source}}": _rate("leeway_weights_received_bytes_total", "source")},
        "From the publisher crosses between the clusters; from relays does not.",
    ),
    Panel("Staging at a node", "s", _quantiles("leeway_weights_stage_seconds")),
    Panel("Pause of generation", "s", _quantiles("leeway_weights_pause_seconds")),
    Panel(
        "What went wrong",
        "none",
        {
            "refused, {{at}}": _rate("leeway_weights_refused_total", "at"),
            "broken transfers": _total("leeway_weights_broken_transfers_total"),
            "restarts": _total("leeway_weights_restarts_total"),
        },
    ),
]
_NODES = [
    Panel(
        "Nodes",
        "none",
        {
            "known to the queue": "max(leeway_queue_nodes)",
            "subscribed": "max(leeway_weights_nodes)",
        },
    ),
    Panel("Lag by node", "none", {"{{pod}}": "leeway_weights_lag_versions"}, "In versions."),
    Panel("Tokens by node", "none", {"{{pod}}": _rate("leeway_rollout_tokens_total", "pod")}),
    Panel("Samples in work", "none", {"{{pod}}": "leeway_rollout_unfinished_samples"}),
    Panel(
        "Reward calls",
        "none",
        {"{{outcome}}": _rate("leeway_reward_calls_total", "outcome")},
        "Everything but ok is a fault of the reward function or its deadline.",
    ),
    Panel(
        "Sandboxes",
        "none",
        {
            "busy workers": "sum(leeway_sandbox_busy_workers)",
            "waiting calls": "sum(leeway_sandbox_waiting_calls)",
            "lost a second by {{pod}}": _rate("leeway_sandbox_lost_total", "pod"),
        },
        "Rewards and environments in pods of their own; a node loses calls to those that go away.",
    ),
    Panel("Memory by pod", "bytes", {"{{pod}}": "process_resident_memory_bytes"}),
]
DASHBOARDS = {
    "overview": ("Leeway: overview", _OVERVIEW),
    "queue": ("Leeway: queue", _QUEUE),
    "weights": ("Leeway: weights", _WEIGHTS),
    "nodes": ("Leeway: nodes", _NODES),
}


def dashboard(name: str) -> str:
    """A dashboard as Grafana imports it."""
    title, panels = DASHBOARDS[name]
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    content = {
        "uid": f"leeway-{name}",
        "title": title,
        "tags": ["leeway"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }
    return json.dumps(content, indent=2) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [
        {"refId": chr(ord("A") + index), "datasource": source, "expr": expr, "legendFormat": legend}
        for index, (legend, expr) in enumerate(panel.queries.items())
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
