"""The charts render, under both majors of Helm, what every Kubernetes from 1.29 to 1.37 takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.helm import derive
from leeway.config import Config, load
from tests.deploy import schemas
from tests.deploy.charts import (
    EXAMPLES,
    HELM,
    MAJORS,
    NAMESPACE,
    SIDES,
    chart,
    helm,
    of_kind,
    render,
    values_files,
)

GOLDEN = Path(__file__).parent / "golden"
CASES = [(example, side) for example in EXAMPLES for side in SIDES]


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(("example", "side"), CASES)
def test_lint_finds_nothing(example: str, side: str, major: str) -> None:
    files = [f"--values={path}" for path in values_files(example, side)]
    done = helm(major, "lint", "--strict", chart(side), *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize("version", schemas.VERSIONS)
@pytest.mark.parametrize(("example", "side"), CASES)
def test_every_manifest_fits_its_schema(example: str, side: str, version: str) -> None:
    manifests = render(example, side, version=version)
    names = [(m["apiVersion"], m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(names) == len(set(names)), "duplicates"
    for manifest, name in zip(manifests, names, strict=True):
        assert schemas.faults(manifest, version) == [], name


@pytest.mark.parametrize(("example", "side"), CASES)
def test_both_majors_render_the_golden_manifests(example: str, side: str) -> None:
    """After a wanted change: `make charts`, and read the difference."""
    golden = list(yaml.safe_load_all((GOLDEN / f"{example}-{side}.yaml").read_text()))
    for major in MAJORS:
        rendered = sorted(render(example, side, major), key=_identity)
        assert [_identity(m) for m in rendered] == [_identity(m) for m in golden]
        for ours, expected in zip(rendered, golden, strict=True):
            assert ours == expected, _identity(ours)


def _identity(manifest: dict) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def write_golden() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for example, side in CASES:
        manifests = sorted(render(example, side), key=_identity)
        text = yaml.safe_dump_all(manifests, sort_keys=True, width=100)
        (GOLDEN / f"{example}-{side}.yaml").write_text(text)


def test_derived_files_are_current() -> None:
    for path, content in derive.current().items():
        assert path.read_text() == content, f"{path}: run `make charts`"


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(
    ("side", "assignment"),
    [
        ("trainer", "queue.replica=3"),
        ("trainer", "trainer.gpu=8"),
        ("trainer", "redis.storage.class=fast"),
        ("trainer", 'security.authentication="none"'),
        ("trainer", "queue.replicas=0"),
        ("trainer", 'trainer.resources.limits.memory="much"'),
        ("trainer", "run.trainer.lrr=1"),
        ("trainer", "run.staleness.budget=-1"),
        ("trainer", "run.security.token=1"),
        ("trainer", 'run.queue.redis_url="redis://:secret@host"'),
        ("rollout", 'run.rollout.gateway.token="secret"'),
        ("trainer", 'redis.external.url="rediss://:password@host"'),
        ("rollout", 'trainerCluster.queue="https://example.com"'),
        ("rollout", "nodes.replica=3"),
        ("rollout", "run.sampling.temperature=0"),
        ("rollout", "unknown=1"),
        ("rollout", "sandbox.replica=1"),
        ("rollout", "sandbox.autoscaling.cpu=0"),
    ],
)
def test_a_wrong_value_is_refused_by_name(side: str, assignment: str, major: str) -> None:
    files = [f"--values={path}" for path in values_files("laptop", side)]
    done = helm(major, "template", side, chart(side), *files, f"--set-json={assignment}")
    assert done.returncode != 0
    keys = assignment.partition("=")[0].split(".")
    assert keys[-1] in done.stderr or keys[-2] in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("side", "sets", "message"),
    [
        ("trainer", ["trainer.pods=2"], "accessMode to ReadWriteMany"),
        ("trainer", ["trainer.minPods=2"], "trainer.minPods > trainer.pods"),
        (
            "trainer",
            ["trainer.minPods=1", "trainer.leaderWorkerSet=true"],
            "trainer.leaderWorkerSet to false",
        ),
        ("trainer", ['security.certificates="existing"'], "security.secrets."),
        ("trainer", ['security.certificates="cert-manager"'], "security.issuer.name"),
        ("trainer", ["endpoint.gateway.enabled=true"], "endpoint.gateway.hosts.queue"),
        (
            "trainer",
            ['redis.external.url="rediss://host"', "redis.exporter.enabled=true"],
            "redis.exporter.enabled",
        ),
        ("rollout", ['trainerCluster.queue=""'], "trainerCluster.queue"),
        (
            "rollout",
            ["nodes.relay=true", 'security.authentication="tokens"'],
            "security.authentication to mtls",
        ),
        ("rollout", ["autoscaling.keda.enabled=true"], "autoscaling.keda.prometheus"),
        (
            "rollout",
            ["sandbox.enabled=true", "run.task.reward=null", 'run.task.agent="external"'],
            "with task.agent, disable it",
        ),
        ("rollout", ["sandbox.enabled=true", 'sandbox.secret=""'], "sandbox.secret"),
        (
            "rollout",
            ["autoscaling.keda.enabled=true", "autoscaling.hpa.enabled=true"],
            "choose hpa or keda",
        ),
    ],
)
def test_what_cannot_work_together_says_what_to_do(
    side: str, sets: list[str], message: str
) -> None:
    files = [f"--values={path}" for path in values_files("laptop", side)]
    done = helm("helm4", "template", side, chart(side), *files, *(f"--set-json={s}" for s in sets))
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize("side", SIDES)
def test_every_value_has_its_schema_and_a_description(side: str) -> None:
    values = yaml.safe_load((chart(side) / "values.yaml").read_text())
    schema = json.loads((chart(side) / "values.schema.json").read_text())

    def walk(value: object, part: dict, where: str) -> Iterator[str]:
        assert part.get("description"), where
        if isinstance(value, dict) and "properties" in part:
            assert part["additionalProperties"] is False, where
            for key, inner in value.items():
                yield from walk(inner, part["properties"][key], f"{where}.{key}")
        yield where

    known = set(walk({**values, "run": None}, schema, ""))
    assert len(known) > 30


@pytest.mark.parametrize("side", SIDES)
def test_the_values_file_is_short_and_has_no_secret(side: str) -> None:
    text = (chart(side) / "values.yaml").read_text()
    assert len(text.splitlines()) < 130
    assert "BEGIN" not in text and "password:" not in text


# The run's configuration --------------------------------------------------------------------------


@pytest.mark.parametrize("major", MAJORS)
def test_the_run_arrives_as_it_was_written(major: str, tmp_path: Path) -> None:
    """Helm turns numbers into floats and prints large ones with exponents."""
    sets = (
        "run.queue.max_bytes=68719476736",
        "run.trainer.lr=1e-6",
        "run.run.seed=123456789012",
        "run.sampling.temperature=1",
    )
    for side in SIDES:
        (config_map,) = [
            m
            for m in of_kind(render("laptop", side, major, sets=sets), "ConfigMap")
            if m["metadata"]["name"].endswith("-run")
        ]
        path = tmp_path / f"{side}.yaml"
        path.write_text(config_map["data"]["run.yaml"])
        config = load(path, environ={})
        assert config.queue.max_bytes == 68719476736
        assert config.trainer.lr == 1e-6
        assert config.run.seed == 123456789012
        assert config.task.reward == "/leeway/files/rewards.py:reward"


_FILE = st.from_regex(r"\A[a-z][a-z0-9._-]{0,20}\Z")
_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))
_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "queue": st.fixed_dictionaries({"replicas": st.integers(1, 9)}),
        "endpoint": st.fixed_dictionaries(
            {"type": st.sampled_from(["LoadBalancer", "NodePort", "ClusterIP"])}
        ),
        "security": st.fixed_dictionaries({"authentication": st.sampled_from(["mtls", "tokens"])}),
        "trainer": st.fixed_dictionaries(
            {
                "gpus": st.integers(0, 8),
                "processes": st.integers(1, 8),
                "leaderWorkerSet": st.booleans(),
            }
        ),
        "networkPolicy": st.fixed_dictionaries({"enabled": st.booleans()}),
        "files": st.dictionaries(
            st.from_regex(r"\A[a-z][a-z0-9._-]{0,20}\Z"),
            st.text(st.characters(codec="utf-8")),
            max_size=2,
        ),
        "model": st.fixed_dictionaries({"claim": st.sampled_from(["", "y", "n", "models"])}),
        "monitoring": st.fixed_dictionaries(
            {"rules": st.fixed_dictionaries({"enabled": st.booleans()})}
        ),
    },
)


@settings(max_examples=15, deadline=None)
@given(_VALUES)
def test_whatever_the_schema_allows_renders_and_fits(values: dict) -> None:
    sets = tuple(f"{key}={json.dumps(value)}" for key, value in sorted(values.items()))
    for manifest in render.__wrapped__("laptop", "trainer", sets=sets):
        assert schemas.faults(manifest, "1.37") == [], _identity(manifest)
        assert manifest["metadata"].get("namespace") == NAMESPACE, _identity(manifest)


def test_the_schema_of_the_run_is_the_configurations() -> None:
    schema = json.loads((HELM / "rollout-cluster" / "values.schema.json").read_text())
    assert set(schema["properties"]["run"]["properties"]) == set(Config.model_fields) - {
        "security",
        "telemetry",
    }


if __name__ == "__main__":
    write_golden()
