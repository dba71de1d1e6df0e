"""Alerts fire when they should; dashboards, alerts and pages speak of metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from deploy.helm.dashboards import DASHBOARDS
from tests.deploy.charts import ROOT, tool
from trajectory_queue.commands import Report
from trajectory_queue.metrics import LedgerCollector

ALERTS = ROOT / "deploy" / "alerts" / "leeway.yaml"
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]
}
REPORT = Report(
    run_id="run",
    version=1,
    incarnation=1,
    budget=2,
    batch_groups=4,
    groups=dict.fromkeys(("waiting", "running", "queued", "leased", "dead"), 0),
    enqueued=0,
    eval_groups={},
    counters={"refused": 0},
    payload_bytes=0,
    nodes=(),
    trainer_waiting_ms=0,
    trainer_has=0,
    trainer_wants=0,
    oldest_queued_ms=0,
    paused=False,
    draining=False,
    step_metrics="",
)
# Each alert: series that make it fire, and series that do not, as promtool writes them.
ESS = 'leeway_trainer{metric="effective_sample_size"}'
KL = 'leeway_trainer{metric="mismatch_kl_k3_mean"}'
DEAD = 'leeway_queue_groups{lane="train",state="dead"}'
STALENESS = 'leeway_trainer{metric="staleness_max"}'
OK, FAULT = (f'leeway_reward_calls_total{{outcome="{outcome}"}}' for outcome in ("ok", "fault"))
FAST, SLOW, ALL = (
    f'leeway_queue_loop_lag_seconds_bucket{{le="{le}"}}' for le in ("0.1", "0.2", "+Inf")
)
BUDGET = {"leeway_queue_budget": "2x90"}
Series = dict[str, str]
CASES: dict[str, tuple[Series, Series]] = {
    "LeewayQueueDown": ({"other": "1x90"}, {"leeway_queue_version": "1x90"}),
    "LeewayNoNodes": ({"leeway_queue_nodes": "0x90"}, {"leeway_queue_nodes": "1x90"}),
    "LeewayBudgetExceeded": ({STALENESS: "3x90", **BUDGET}, {STALENESS: "2x90", **BUDGET}),
    "LeewayTrainerStarved": (
        {"leeway_queue_trainer_waiting_seconds": "0+60x90"},
        {"leeway_queue_trainer_waiting_seconds": "60x90"},
    ),
    "LeewayTrainerStalled": (
        {"leeway_queue_oldest_queued_seconds": "0+60x90"},
        {"leeway_queue_oldest_queued_seconds": "600x90"},
    ),
    "LeewayTrainerRestarts": (
        {"leeway_queue_incarnation": "1+0.2x90"},
        {"leeway_queue_incarnation": "7x90"},
    ),
    "LeewayNodesLag": (
        {"leeway_queue_node_version_lag_max": "4x90", **BUDGET},
        {"leeway_queue_node_version_lag_max": "3x90", **BUDGET},
    ),
    "LeewayWeightsLag": (
        {"leeway_weights_lagging_nodes": "1x90"},
        # Full weights may take their time.
        {"leeway_weights_lagging_nodes": "0x80 1x10"},
    ),
    "LeewayDeadTasks": ({DEAD: "0+1x90"}, {DEAD: "5x90"}),
    "LeewayTrajectoriesRefused": (
        {'leeway_queue_events_total{event="refused"}': "0+1x90"},
        {'leeway_queue_events_total{event="refused"}': "5x90"},
    ),
    "LeewayQueueLoopLag": (
        {FAST: "0+90x90", SLOW: "0+100x90", ALL: "0+100x90"},
        {FAST: "0+100x90", SLOW: "0+100x90", ALL: "0+100x90"},
    ),
    "LeewayWeightsRefused": (
        {'leeway_weights_refused_total{at="staging"}': "0+1x90"},
        {'leeway_weights_refused_total{at="staging"}': "3x90"},
    ),
    "LeewayBroadcastRestarts": (
        {"leeway_weights_restarts_total": "0+1x90"},
        {"leeway_weights_restarts_total": "1x90"},
    ),
    "LeewayOffPolicy": ({ESS: "0.4x90"}, {ESS: "0.6x90"}),
    "LeewayEngineMismatch": ({KL: "0.002x90"}, {KL: "0.0005x90"}),
    "LeewayRewardFaults": ({OK: "0+90x90", FAULT: "0+10x90"}, {OK: "0+1000x90", FAULT: "0+1x90"}),
    "LeewayCallsRefused": (
        {'leeway_rpc_refused_total{reason="token"}': "0+1x90"},
        {'leeway_rpc_refused_total{reason="token"}': "2x90"},
    ),
}


def test_every_alert_has_a_case_a_page_and_a_summary() -> None:
    assert set(CASES) == set(RULES)
    pages = {path.stem for path in (ROOT / "docs" / "runbook").glob("Leeway*.md")}
    assert pages == set(RULES)
    for name, rule in RULES.items():
        page = (ROOT / "docs" / "runbook" / f"{name}.md").read_text()
        for part in ("**Symptom.**", "**Metric.**", "**Action.**"):
            assert part in page, name
        for metric in metrics_of(rule["expr"]):
            assert metric.removesuffix("_bucket") in page, name
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_alerts_fire_and_stay_silent(tmp_path: Path) -> None:
    tests = []
    for name, (firing, silent) in CASES.items():
        for series, fires in ((firing, True), (silent, False)):
            expr = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
            value = {"expr": expr, "eval_time": "85m", "exp_samples": [{"value": int(fires)}]}
            inputs = [{"series": key, "values": text} for key, text in series.items()]
            tests.append(
                {
                    "name": f"{name}: {'fires' if fires else 'is silent'}",
                    "interval": "1m",
                    "input_series": inputs,
                    "promql_expr_test": [value],
                }
            )
    file = tmp_path / "alerts.test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def metrics_of(expression: str) -> set[str]:
    """The metrics that PromQL names."""
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    return set(re.findall(r"\bleeway_[a-z_]+|\bprocess_[a-z_]+", str(parsed)))


@cache
def exported() -> dict[str, str]:
    """Every metric that Leeway's processes export, and its type, out of their registry."""
    code = """
import importlib, json, pkgutil
from prometheus_client import REGISTRY
for package in ("leeway", "trajectory_queue", "rollout_service", "trainer_service"):
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] in ("leeway", "rollout_service", "trainer_service"):
                raise
found = {metric.name: metric.type for metric in REGISTRY.collect()}
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    # The ledger's are there once a report is.
    collector = LedgerCollector()
    collector.update(REPORT, nodes_wanted=1)
    return {**found, **{metric.name: metric.type for metric in collector.collect()}}


def is_exported(name: str) -> bool:
    known = exported()
    suffixes = {
        "counter": ("_total", "_created"),
        "histogram": ("_bucket", "_count", "_sum"),
        "gauge": ("",),
        "unknown": ("",),
    }
    return any(
        name == metric + suffix
        for metric, kind in known.items()
        for suffix in suffixes.get(kind, ("",))
    )


def test_every_query_names_metrics_that_there_are() -> None:
    queries = {name: rule["expr"] for name, rule in RULES.items()}
    for name, (_, panels) in DASHBOARDS.items():
        for panel in panels:
            for legend, query in panel.queries.items():
                queries[f"{name}/{panel.title}/{legend}"] = query
    for where, query in queries.items():
        names = metrics_of(query)
        assert names, where
        for name in names:
            assert is_exported(name), f"{where}: {name}"


def test_steps_that_dashboards_show_are_recorded_and_explained() -> None:
    glossary = "".join(p.read_text() for p in (ROOT / "docs").glob("*.md"))
    texts = [path.read_text() for path in (ROOT / "deploy" / "dashboards").glob("*.json")]
    code = [p for name in ("leeway", "trainer_service") for p in (ROOT / name).rglob("*.py")]
    recorded = "".join(path.read_text() for path in code)
    for name in set(re.findall(r'metric=\\"([a-z_0-9]+)', "".join(texts))):
        assert f"`{name}`" in glossary, name
        stem = name.removesuffix("_seconds")
        assert name in recorded or f'"{stem}"' in recorded, name


def test_the_glossary_has_every_metric() -> None:
    """By its whole name, or by the end that tells it from the one before it in the table."""
    text = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for name in exported():
        if name.startswith("leeway_"):
            ends = [name, *(name[at:] for at, letter in enumerate(name) if letter == "_")]
            assert any(f"`{end}" in text for end in ends), name


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_a_dashboard_is_whole(name: str) -> None:
    board: dict[str, Any] = json.loads((ROOT / "deploy/dashboards" / f"{name}.json").read_text())
    assert board["title"] and board["panels"]
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(refs) == len(set(refs))
