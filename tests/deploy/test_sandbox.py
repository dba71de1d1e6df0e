"""Sandboxes as the rollout chart starts them, with a run that trains through them while they die.

The node and the sandboxes get the chart's commands and environments, with mutual TLS; only paths
and addresses are this machine's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from leeway.deploy.credentials import Parts, make, utc_now
from leeway.local import free_addresses
from leeway.process import LIFELINE
from leeway.trajectory import Group
from leeway.v1 import trajectory_pb2
from tests import tiny
from tests.deploy.charts import NAMESPACE, Manifest, chart, helm, of_kind, tool, workloads
from tests.deploy.two_clusters import RUN
from tests.waiting import children, gone, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(290)]

# No answer is worth 0: a 0 that is trained on would be a failure that passed for a score.
REWARD = """
import time

def reward(completion, **columns):
    time.sleep(0.05)
    return 0.25 + sum(character in "aeiou" for character in completion) / 16
"""
STEPS = 1_000_000


@dataclass
class Started:
    """Processes by name, which can be started again."""

    directory: Path
    commands: dict[str, tuple[list[str], dict[str, str]]] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        command, environment = self.commands[name]
        with self.log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment
            )

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def said(self) -> str:
        ends = [self.log(name).read_text().splitlines()[-8:] for name in self.running]
        return "\n".join(
            f"--- {n}\n" + "\n".join(e) for n, e in zip(self.running, ends, strict=True)
        )

    def metric(self, name: str, pattern: str) -> float:
        """The sum of a process's samples."""
        address = self.commands[name][1]["LEEWAY__TELEMETRY__METRICS_ADDRESS"]
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return 0.0
        return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.M))

    def ready(self, name: str) -> bool:
        address = self.commands[name][1]["LEEWAY__TELEMETRY__METRICS_ADDRESS"]
        try:
            with urllib.request.urlopen(f"http://{address}/readyz", timeout=5):
                return True
        except OSError:
            return False

    def steps(self) -> list[dict[str, Any]]:
        file = self.directory / "runs" / "tiny" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if row["kind"] == "step"]

    def await_steps(self, more: int, what: str) -> None:
        wanted = len(self.steps()) + more
        until(lambda: len(self.steps()) >= wanted, what, 90, self.said)


@pytest.fixture(scope="module")
def run() -> Iterator[Started]:
    with started() as made:
        yield made


@contextmanager
def started() -> Iterator[Started]:
    """Queue and trainer; a node and two sandboxes as the chart has them."""
    tool("helm4")
    with tempfile.TemporaryDirectory(prefix="leeway-") as name:
        made = Started(Path(name))
        _prepare(made)
        try:
            for each in made.commands:
                made.start(each)
            yield made
        finally:
            for process in made.running.values():
                process.kill()
                process.wait()


def _prepare(made: Started) -> None:
    root = made.directory
    queue, weights, *others = free_addresses(7)
    sandboxes, metrics = others[:2], others[2:]
    for secret, data in make(Parts("leeway", ("localhost",)), {}, utc_now()).items():
        (root / secret).mkdir()
        for key, content in data.items():
            (root / secret / key).write_bytes(content)
    tiny.build(root / "model")
    settings = {
        **RUN,
        "files": {**RUN["files"], "rewards.py": REWARD},  # type: ignore[dict-item]
        "trainerCluster": {"queue": queue, "weights": weights},
        "security": {"secret": "leeway-rollout-tls", "serverName": "localhost"},
        "sandbox": {"enabled": True, "secret": "leeway-sandbox-tls", "drainSeconds": 5},
    }
    (root / "values.yaml").write_text(yaml.safe_dump(settings))
    done = helm(
        "helm4",
        "template",
        "rollout",
        chart("rollout"),
        f"-n={NAMESPACE}",
        "-f",
        root / "values.yaml",
    )
    assert done.returncode == 0, done.stderr
    manifests: tuple[Manifest, ...] = tuple(m for m in yaml.safe_load_all(done.stdout) if m)
    maps = {m["metadata"]["name"]: m["data"] for m in of_kind(manifests, "ConfigMap")}

    def here(text: str, component: str) -> str:
        """This machine's paths."""
        text = text.replace("/leeway/tls", str(root / f"leeway-{component}-tls"))
        return text.replace("/leeway/", f"{root}/")

    for folder, config_map in (("config", "rollout-run"), ("files", "rollout-files")):
        (root / folder).mkdir()
        for file, text in maps[config_map].items():
            (root / folder / file).write_text(here(text, "rollout"))

    def add(name: str, component: str, words: list[str], environment: dict[str, str]) -> None:
        program = Path(sys.executable).with_name(words[0])
        command = [str(program), *(here(word, component) for word in words[1:])]
        variables = {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            # They end with the tests, however those end.
            LIFELINE: "1",
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **{key: here(value, component) for key, value in environment.items()},
        }
        made.commands[name] = command, variables

    proof = {
        "LEEWAY__SECURITY__CERTIFICATE": "/leeway/tls/tls.crt",
        "LEEWAY__SECURITY__KEY": "/leeway/tls/tls.key",
        "LEEWAY__SECURITY__AUTHORITY": "/leeway/tls/ca.crt",
        "LEEWAY__SECURITY__SERVER_NAME": "localhost",
        "LEEWAY__QUEUE__ADDRESS": queue,
        "LEEWAY__WEIGHTS__ADDRESS": weights,
        "LEEWAY__RUN__DIRECTORY": "/leeway/runs",
    }
    (root / "runs").mkdir()
    add("queue", "queue", ["leeway", "queue", "serve", "/leeway/config/run.yaml"], proof)
    add("trainer", "trainer", ["leeway", "trainer", "/leeway/config/run.yaml"], proof)
    of = {w.labels["app.kubernetes.io/component"]: w.containers[0] for w in workloads(manifests)}
    places = [("sandbox-0", "sandbox"), ("sandbox-1", "sandbox"), ("node", "rollout")]
    for (name, component), own in zip(places, metrics, strict=True):
        container = of[component]
        environment = {v["name"]: v.get("value", name) for v in container["env"]}
        environment["LEEWAY__TELEMETRY__METRICS_ADDRESS"] = own
        address = environment["LEEWAY__ROLLOUT__SANDBOX__ADDRESS"]
        if component == "sandbox":
            assert address == "0.0.0.0:7003"
            address = sandboxes[int(name[-1])]
        else:
            # What the headless Service's name stands for.
            assert address == f"rollout-sandbox.{NAMESPACE}.svc:7003"
            address = f"ipv4:{','.join(sandboxes)}"
        environment["LEEWAY__ROLLOUT__SANDBOX__ADDRESS"] = address
        words = [
            w.replace("$(POD_NAME)", name) for w in (*container["command"], *container["args"])
        ]
        add(name, component, words, environment)


def test_it_trains_through_sandboxes_that_are_killed_and_nothing_is_lost(run: Started) -> None:
    until(lambda: len(run.steps()) >= 1, "the first trained step", 180, run.said)
    for victim in ("sandbox-0", "sandbox-1"):
        until(lambda v=victim: run.ready(v), f"{victim} is ready", 60, run.said)
        until(
            lambda v=victim: run.metric(v, "leeway_sandbox_busy_workers") > 0,
            f"{victim} is asked",
            60,
            run.said,
        )
        workers = children(run.running[victim].pid)
        run.kill(victim)
        run.await_steps(2, f"steps without {victim}")
        until(lambda w=workers: gone(w), f"the workers of {victim} end", 10, run.said)
        run.start(victim)
    # And none at all for a while: calls wait.
    for victim in ("sandbox-0", "sandbox-1"):
        run.kill(victim)
    lost = run.metric("node", "leeway_sandbox_lost_total")
    until(
        lambda: run.metric("node", "leeway_sandbox_lost_total") > lost, "calls wait", 60, run.said
    )
    for victim in ("sandbox-0", "sandbox-1"):
        run.start(victim)
    run.await_steps(3, "steps after all were gone")

    rows = run.steps()
    trained = [task for row in rows for task in row["tasks"]]
    assert len(trained) == len(set(trained)), "a task was trained twice"
    assert [row["version"] for row in rows] == list(range(1, len(rows) + 1))
    # Nothing failed, so that nothing is missing: calls that lost their sandbox were made again.
    said = run.log("node").read_text()
    assert "call is made again" in said
    assert "rollout failed" not in said
    # Streams that broke leave nothing behind.
    assert "Traceback" not in said and "Task was destroyed" not in said
    assert run.running["node"].poll() is None


def test_no_failure_passed_for_a_score(run: Started) -> None:
    samples = (run.directory / "runs" / "tiny" / "trajectories").glob("*.pb")
    groups = [Group.from_wire(trajectory_pb2.Group.FromString(f.read_bytes())) for f in samples]
    scores = [trajectory.score for group in groups for trajectory in group.trajectories]
    assert len(scores) >= 4 * len(run.steps()) - 4
    assert min(scores) >= 0.25
    assert min(row["reward_mean"] for row in run.steps()) >= 0.25


def test_a_sandbox_ran_all_of_it(run: Started) -> None:
    asked = [
        run.metric(f"sandbox-{n}", r'leeway_reward_calls_total\{outcome="ok"\}') for n in (0, 1)
    ]
    assert min(asked) > 0
    assert run.metric("node", r"leeway_reward_calls_total\{.*\}") == 0
    assert not children(run.running["node"].pid, lambda command: "worker.py" in " ".join(command))


def test_told_to_end_it_drains_and_the_run_goes_on(run: Started) -> None:
    leaving = run.running["sandbox-0"]
    leaving.send_signal(signal.SIGTERM)
    assert leaving.wait(30) == 0, run.said()
    run.await_steps(2, "steps with the other")
    assert "rollout failed" not in run.log("node").read_text()
