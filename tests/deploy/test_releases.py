"""Install, upgrade, test, roll back and uninstall: both majors of Helm, against an API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy import kube_api
from tests.deploy.charts import MAJORS, NAMESPACE, SIDES, chart, helm, values_files


class Release:
    """One chart on one API server."""

    def __init__(self, major: str, example: str, side: str, url: str, home: Path) -> None:
        self._major, self._side = major, side
        self._files = [f"--values={path}" for path in values_files(example, side)]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}],
            "current-context": "c",
        }
        kubeconfig = home / "kubeconfig"
        kubeconfig.write_text(json.dumps(config))
        self._environment = {"KUBECONFIG": str(kubeconfig), "HOME": str(home)}

    def run(self, verb: str, *more: str) -> str:
        done = helm(
            self._major,
            verb,
            self._side,
            *more,
            f"--namespace={NAMESPACE}",
            environment=self._environment,
        )
        assert done.returncode == 0, f"{verb}: {done.stdout}{done.stderr}"
        return done.stdout

    def apply(self, verb: str, *sets: str) -> str:
        pairs = [f"--set-json={pair}" for pair in sets]
        wait = ["--wait", "--timeout=30s"]
        return self.run(verb, str(chart(self._side)), *self._files, *pairs, *wait)


@pytest.fixture
def cluster() -> Iterator[tuple[kube_api.Cluster, str]]:
    with kube_api.serving("1.37") as served:
        yield served


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("side", SIDES)
# Between them, these two have every kind of object.
@pytest.mark.parametrize("example", ["laptop", "one-cluster", "two-clouds"])
def test_a_release_lives_its_life(
    cluster: tuple[kube_api.Cluster, str], example: str, side: str, major: str, tmp_path: Path
) -> None:
    api, url = cluster
    release = Release(major, example, side, url, tmp_path)
    notes = release.apply("install")
    assert "Next:" in notes and "helm test" in notes
    before = len(api.objects)
    assert before > 5

    changed = "queue.replicas=5" if side == "trainer" else 'telemetry.logLevel="debug"'
    release.apply("upgrade", changed)
    for deployment in api.of_kind("Deployment"):
        assert ("5" if side == "trainer" else "debug") in json.dumps(deployment["spec"])

    release.run("test")
    release.run("rollback", "1", "--wait", "--timeout=30s")
    for deployment in api.of_kind("Deployment"):
        assert "debug" not in json.dumps(deployment["spec"])
        assert '"replicas": 5' not in json.dumps(deployment["spec"])

    release.run("uninstall")
    left = {each["kind"] for each in api.objects.values()} - {"Namespace"}
    # Checkpoints outlive the release; the check's log may be wanted.
    assert left <= {"PersistentVolumeClaim", "Pod"}, left


def test_the_api_server_refuses_what_kubernetes_would(
    cluster: tuple[kube_api.Cluster, str], tmp_path: Path
) -> None:
    """The proof above is worth something only if a wrong manifest would have failed it."""
    _, url = cluster
    release = Release("helm4", "laptop", "trainer", url, tmp_path)
    with pytest.raises(AssertionError, match="is invalid"):
        release.apply("install", 'queue.tolerations=[{"kee": "x"}]')
