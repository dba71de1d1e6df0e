"""Both charts, installed into network namespaces: real processes, as the charts say."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from leeway import models
from tests import tiny
from tests.deploy.charts import (
    NAMESPACE,
    ROOT,
    Manifest,
    Workload,
    chart,
    helm,
    of_kind,
    tool,
    workloads,
)
from tests.deploy.network import Cluster, Link
from tests.deploy.pods import Pod, Storage, decoded
from tests.waiting import until

OUTSIDE = {"trainer": "203.0.113.1", "rollout": "203.0.113.2"}
DELAY_MS, LOSS_PERCENT = 80, 1
REWARD = """
def reward(completion, **columns):
    return sum(character in "aeiou" for character in completion) / 12
"""
_ROWS = [{"prompt": f"say {word}", "answer": word} for word in "abcdefghijklmnopqrstuvwxyz"]
RUN = {
    "run": {
        "run": {"name": "tiny", "seed": 3},
        "model": {"path": "/leeway/model"},
        "task": {"jsonl": "/leeway/files/rows.jsonl", "reward": "/leeway/files/rewards.py:reward"},
        "sampling": {"group_size": 4, "max_new_tokens": 12},
        "queue": {"lease_seconds": 5, "filter_equal_scores": False},
        "rollout": {"heartbeat_seconds": 1},
        "trainer": {
            "batch_groups": 4,
            "steps": 1_000_000,
            "lr": 1e-3,
            "checkpoint_every": 10,
            "batch_seconds": 300,
        },
    },
    "files": {
        "rewards.py": REWARD,
        "rows.jsonl": "\n".join(json.dumps(row) for row in _ROWS),
    },
    "model": {"claim": "model"},
}


def _traces(side: str) -> dict[str, Any]:
    """Each cluster has a collector, at its router; here both write into one file."""
    return {"traces": {"endpoint": f"http://{NETWORKS[side]}.1:{TRACES_PORT}/v1/traces"}}


NETWORKS = {"trainer": "10.11.0", "rollout": "10.12.0"}
TRACES_PORT = 4318
TRAINER = {
    "endpoint": {"type": "LoadBalancer"},
    "redis": {"maxMemory": "512mb"},
    "telemetry": _traces("trainer"),
}
ROLLOUT = {
    "trainerCluster": {
        "queue": f"{OUTSIDE['trainer']}:7000",
        "weights": f"{OUTSIDE['trainer']}:7001",
    },
    "security": {"secret": "trainer-rollout-tls"},
    "nodes": {"replicas": 2, "drainSeconds": 3, "relay": True},
    "sandbox": {
        "enabled": True,
        "secret": "trainer-sandbox-tls",
        "replicas": 2,
        "drainSeconds": 3,
    },
    "telemetry": _traces("rollout"),
}


@dataclass(frozen=True)
class Job:
    """What the clusters run: the values of both charts' run.yaml, and the model on their volume."""

    run: Mapping[str, Any]
    model: Path
    rollout: Mapping[str, Any]
    """Values of the rollout cluster's chart."""


def tiny_job(directory: Path) -> Job:
    return Job(RUN, tiny.build(directory / "model"), ROLLOUT)


def quickstart_job(directory: Path) -> Job:
    """`examples/quickstart.yaml` without an end, its model and its reward; one node, far away."""
    run = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())
    reward = Path("examples/quickstart_reward.py")
    for name in ("keep", "reward"):
        run["task"][name] = run["task"][name].replace(str(reward), f"/leeway/files/{reward.name}")
    run["model"]["path"] = "/leeway/model"
    run["trainer"] |= {"steps": 1_000_000, "batch_seconds": 600}
    run["rollout"]["prefetch_groups"] = 1
    shutil.copytree(models.resolve("smollm2-135m-instruct"), directory / "model")
    return Job(
        {"run": run, "files": {reward.name: (ROOT / reward).read_text()}, "model": RUN["model"]},
        directory / "model",
        ROLLOUT | {"nodes": {"replicas": 1}},
    )


class Side:
    """One cluster with one release."""

    def __init__(self, name: str, directory: Path, model: Path, spans: Path) -> None:
        self.name = name
        self.cluster = Cluster(name[0], NETWORKS[name])
        self._collector = self.cluster.start(
            *(sys.executable, ROOT / "tests/deploy/collector.py"),
            *(f"{NETWORKS[name]}.1", str(TRACES_PORT), spans),
        )
        self.pods: dict[str, Pod] = {}
        self.storage = Storage(directory, {}, {}, {"model": model})
        self.workloads: dict[str, Workload] = {}
        self.hosts: dict[str, list[str]] = {}
        self._places: dict[str, tuple[str, tuple[str, str]]] = {}

    def render(self, values: Path, run: Path) -> tuple[Manifest, ...]:
        files = [f"--values={run}", f"--values={values}"]
        done = helm("helm4", "template", self.name, chart(self.name), f"-n={NAMESPACE}", *files)
        assert done.returncode == 0, done.stderr
        manifests = tuple(each for each in yaml.safe_load_all(done.stdout) if each)
        self.storage.config_maps = {
            each["metadata"]["name"]: each["data"] for each in of_kind(manifests, "ConfigMap")
        }
        self.workloads = {
            each.labels["app.kubernetes.io/component"]: each for each in workloads(manifests)
        }
        return manifests

    def place(self, component: str, name: str) -> str:
        """Gives a pod its place; returns its address."""
        network = self.cluster.add_pod()
        self._places[name] = component, network
        return network[1]

    def start(self, name: str) -> Pod:
        component, network = self._places[name]
        pod = Pod(name, self.workloads[component], self.storage, network, self.hosts)
        self.pods[name] = pod
        return pod

    def start_all(self) -> None:
        for name in self._places:
            self.start(name)

    def of(self, component: str) -> list[Pod]:
        return [pod for name, pod in self.pods.items() if f"-{component}-" in name]

    def restart(self, component: str, seconds: float = 120.0) -> None:
        """One pod after the other, each when the one before is ready again."""
        for pod in self.of(component):
            pod.stop(20.0)
            fresh = self.start(pod.name)
            until(fresh.ready, f"{fresh.name} is ready again", seconds, fresh.said)

    def close(self) -> None:
        for pod in self.pods.values():
            pod.kill()
        self._collector.kill()
        self._collector.wait()
        self.cluster.close()


class TwoClusters:
    """Both sides, and the link between them."""

    def __init__(self, directory: Path, job: Job) -> None:
        self.directory = directory
        self.job = job
        self.name = job.run["run"]["run"]["name"]
        for path in (job.model, *job.model.iterdir()):
            path.chmod(0o755)
        (directory / "t").mkdir()
        (directory / "r").mkdir()
        self.spans = directory / "spans.jsonl"
        self.trainer = Side("trainer", directory / "t", job.model, self.spans)
        self.rollout = Side("rollout", directory / "r", job.model, self.spans)
        self.link = Link(
            (self.trainer.cluster.router, OUTSIDE["trainer"]),
            (self.rollout.cluster.router, OUTSIDE["rollout"]),
        )
        self.link.say(f"delay {DELAY_MS}")
        self.link.say(f"loss {LOSS_PERCENT}")
        self.rollout.cluster.hide()

    def install_trainer(self) -> None:
        """`helm install trainer deploy/helm/trainer-cluster -f run.yaml -f trainer.yaml`."""
        side = self.trainer
        side.render(self._write("trainer.yaml", TRAINER), self._write("run.yaml", self.job.run))
        side.storage.secrets = _made_by(side.workloads["credentials"])
        side.hosts["trainer-redis"] = [side.place("redis", "trainer-redis-0")]
        queues = [side.place("queue", f"trainer-queue-{n}") for n in range(2)]
        side.hosts["trainer-endpoint"] = queues
        side.cluster.serve(7000, queues)
        side.cluster.serve(7001, [side.place("trainer", "trainer-trainer-0")])
        side.start_all()

    def install_rollout(self) -> None:
        """`helm install rollout deploy/helm/rollout-cluster -f run.yaml -f rollout.yaml`."""
        side = self.rollout
        values = self.job.rollout
        side.render(self._write("rollout.yaml", values), self._write("run.yaml", self.job.run))
        names = [values[part]["secret"] for part in ("security", "sandbox")]
        side.storage.secrets = {name: self.trainer.storage.secrets[name] for name in names}
        side.hosts[f"rollout-sandbox.{NAMESPACE}.svc"] = [
            side.place("sandbox", f"rollout-sandbox-{number}")
            for number in range(values["sandbox"]["replicas"])
        ]
        for number in range(values["nodes"]["replicas"]):
            side.place("rollout", f"rollout-rollout-{number}")
        side.start_all()

    def steps(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl on the trainer's volume."""
        file = self.directory / "t" / "claim-trainer-runs" / self.name / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if row["kind"] == "step"]

    def await_steps(self, more: int, what: str, seconds: float = 180.0) -> None:
        before = len(self.steps())
        until(lambda: len(self.steps()) >= before + more, what, seconds, self.said)

    def said(self) -> str:
        """The last lines of every pod."""
        return "\n".join(
            pod.said() for side in (self.trainer, self.rollout) for pod in side.pods.values()
        )

    def close(self) -> None:
        self.link.close()
        self.rollout.close()
        self.trainer.close()

    def _write(self, name: str, values: Any) -> Path:
        path = self.directory / name
        path.write_text(yaml.safe_dump(values))
        return path


def _made_by(job: Workload) -> dict[str, dict[str, bytes]]:
    """What the authority's job makes, by its own command; printed instead of applied."""
    (container,) = job.containers
    command = [container["command"][0], *(a for a in container["args"] if a != "--apply")]
    done = subprocess.run(
        [Path(sys.executable).with_name(command[0]), *command[1:]],
        capture_output=True,
        text=True,
        check=True,
    )
    secrets = yaml.safe_load_all(done.stdout)
    return {secret["metadata"]["name"]: decoded(secret) for secret in secrets}


@contextmanager
def installed(make: Callable[[Path], Job] = tiny_job) -> Iterator[TwoClusters]:
    """Both sides with a job, until its first trained step and while the context lasts.

    Skips the test where this cannot be done.
    """
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for name in ("iptables", "redis-server", "helm4"):
        tool(name)
    # Not in pytest's directory, which other users cannot enter.
    with tempfile.TemporaryDirectory(prefix="leeway-") as directory, contextlib.ExitStack() as end:
        Path(directory).chmod(0o755)
        clusters = TwoClusters(Path(directory), make(Path(directory)))
        end.callback(clusters.close)
        started = time.monotonic()
        clusters.install_trainer()
        clusters.install_rollout()
        clusters.await_steps(1, "the first trained step", 240)
        print(f"first step after {time.monotonic() - started:.0f} s")
        yield clusters
