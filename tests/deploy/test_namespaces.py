"""Two clusters with own addresses, 80 ms and 1% loss apart, the rollout side behind NAT.

The commands, environments and files are those of the charts. `LEEWAY_NAMESPACES=short` runs a form
of minutes, `make namespaces` the full one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.deploy.charts import tool
from tests.deploy.two_clusters import OUTSIDE, TwoClusters, installed
from tests.waiting import until

FORM = os.environ.get("LEEWAY_NAMESPACES")
FULL = FORM == "full"
CUT_SECONDS = 60 if FULL else 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000 if FULL else 900)]


@pytest.fixture(scope="module")
def clusters() -> Iterator[TwoClusters]:
    if FORM is None:
        pytest.skip("takes minutes: LEEWAY_NAMESPACES=short or full, or make namespaces")
    with installed() as made:
        yield made


def test_the_run_goes_through(clusters: TwoClusters) -> None:
    clusters.await_steps(5, "five steps over the link")


def test_every_pod_is_ready_alive_and_not_privileged(clusters: TwoClusters) -> None:
    for side in (clusters.trainer, clusters.rollout):
        for pod in side.pods.values():
            until(pod.ready, f"{pod.name} is ready", 120, pod.said)
            who = pod.run(["id", "-u"])
            assert who.stdout.strip() == "65532", who.stderr
            for path in ("/x", "/leeway/config/x", "/usr/x"):
                assert pod.run(["touch", path]).returncode != 0, path
            status = pod.run(["grep", "-E", "CapEff|NoNewPrivs", "/proc/self/status"]).stdout
            assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status


def test_metrics_are_good_and_logs_are_json_without_secrets(clusters: TwoClusters) -> None:

    for side in (clusters.trainer, clusters.rollout):
        for pod in side.pods.values():
            if "redis" in pod.name:
                continue
            status, text = pod.get("/metrics")
            assert status == 200
            done = subprocess.run(
                [tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True
            )
            faults = [line for line in done.stderr.splitlines() if "leeway_" in line]
            assert not faults, faults
            said = pod.log.read_text()
            lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
            assert lines and all("run" in line and "role" in line for line in lines)
            everything = said + pod.run(["cat", "/proc/1/environ"]).stdout
            for secret in clusters.trainer.storage.secrets.values():
                for name in set(secret) & {"password", "rollout", "tls.key"}:
                    assert secret[name].decode() not in everything, name


def test_the_check_finds_a_good_deployment_from_the_other_side(clusters: TwoClusters) -> None:
    node = clusters.rollout.of("rollout")[0]
    container = clusters.rollout.workloads["check"].containers[0]
    done = node.run([*container["command"], *container["args"]])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BAD" not in done.stdout
    assert "sandbox serves" in done.stdout
    far = [line for line in done.stdout.splitlines() if "sandbox" not in line]
    round_trips = [int(milliseconds) for milliseconds in re.findall(r"(\d+) ms", "\n".join(far))]
    assert round_trips and min(round_trips) >= 155, done.stdout


def test_nodes_pass_weights_on_to_each_other(clusters: TwoClusters) -> None:
    """So that one copy crosses the link."""

    def relayed() -> bool:
        texts = [pod.get("/metrics")[1] for pod in clusters.rollout.of("rollout")]
        return any('leeway_weights_received_bytes_total{source="relay"}' in text for text in texts)

    until(relayed, "weights from another node", 120, clusters.said)


def test_a_trace_follows_a_task_through_both_clusters(clusters: TwoClusters) -> None:
    """From its lease over the node to the step that learned from it."""
    steps = {"lease", "roll out", "push", "learn"}

    def whole() -> bool:
        found: dict[str, set[tuple[str, str]]] = {}
        for line in clusters.spans.read_text().splitlines():
            span = json.loads(line)
            found.setdefault(span["trace"], set()).add((span["service"], span["name"]))
        return any(
            {name for _, name in names} >= steps and len({service for service, _ in names}) == 3
            for names in found.values()
        )

    until(lambda: clusters.spans.exists() and whole(), "a whole trace", 60, clusters.said)


def test_nothing_is_open_on_the_rollout_side(clusters: TwoClusters) -> None:
    """From the trainer's router, and towards the nodes' own addresses."""
    ports = (
        range(1, 65536)
        if FULL
        else [22, 80, 443, 4318, 6379, 7000, 7001, 7002, 8000, 9100, 29400, *range(1, 100)]
    )
    found = _scan(clusters.trainer.cluster.router, OUTSIDE["rollout"], ports)
    assert found == [], found
    inside = [pod.address for pod in clusters.rollout.pods.values()]
    for address in inside:
        assert _scan(clusters.trainer.cluster.router, address, [9100, 7000]) == []
    # The scan would have found something: the trainer side has what it serves, and no more.
    served = _scan(
        clusters.rollout.cluster.router, OUTSIDE["trainer"], [4318, 6379, 7000, 7001, 9100]
    )
    assert served == [7000, 7001]


def test_it_survives_a_cut_of_the_link(clusters: TwoClusters) -> None:
    clusters.link.say("cut")
    time.sleep(CUT_SECONDS)
    clusters.link.say("mend")
    clusters.await_steps(5, "steps after the link was cut")
    for pod in clusters.rollout.of("rollout"):
        assert pod.restarts == 0, pod.said()


def test_it_survives_the_loss_of_half_of_the_nodes(clusters: TwoClusters) -> None:
    gone = clusters.rollout.of("rollout")[0]
    gone.kill()
    clusters.await_steps(5, "steps with half of the nodes")
    clusters.rollout.start(gone.name)
    until(clusters.rollout.pods[gone.name].ready, "the node is back", 180, clusters.said)


def test_it_survives_the_loss_of_a_sandbox(clusters: TwoClusters) -> None:
    gone, other = clusters.rollout.of("sandbox")
    assert gone.address != other.address
    gone.kill()
    clusters.await_steps(5, "steps with half of the sandboxes")
    clusters.rollout.start(gone.name)
    until(clusters.rollout.pods[gone.name].ready, "the sandbox is back", 60, clusters.said)
    for node in clusters.rollout.of("rollout"):
        assert "rollout failed" not in node.log.read_text()


@pytest.mark.parametrize("component", ["queue", "redis", "trainer", "rollout", "sandbox"])
def test_it_survives_a_rolling_restart(clusters: TwoClusters, component: str) -> None:
    side = clusters.rollout if component in ("rollout", "sandbox") else clusters.trainer
    side.restart(component)
    clusters.await_steps(3, f"steps after {component} was restarted")


def test_the_books_are_right_after_all_of_it(clusters: TwoClusters) -> None:
    rows = clusters.steps()
    assert max(row["staleness_max"] for row in rows) <= 2
    newest: dict[int, dict] = {}
    for row in rows:
        newest[row["version"]] = row
    assert sorted(newest) == list(range(1, max(newest) + 1))
    trained = [task for row in newest.values() for task in row["tasks"]]
    assert len(trained) == len(set(trained)), "a task was trained twice"


SCAN = """
import asyncio, json, sys
address, ports = json.load(sys.stdin)
async def look(port, slots):
    async with slots:
        for _ in range(2):
            try:
                async with asyncio.timeout(3):
                    _, writer = await asyncio.open_connection(address, port)
            except TimeoutError:
                continue
            except OSError:
                return
            writer.close()
            print(port)
            return
async def main():
    slots = asyncio.Semaphore(900)
    await asyncio.gather(*(look(port, slots) for port in ports))
asyncio.run(main())
"""


def _scan(namespace: str, address: str, ports: Sequence[int]) -> list[int]:
    """Those of the ports that answer, seen from a namespace."""
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, sys.executable, "-c", SCAN],
        input=json.dumps([address, list(ports)]),
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    return sorted(int(line) for line in done.stdout.split())
