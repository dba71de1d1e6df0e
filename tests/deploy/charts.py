"""The charts, and what Helm makes of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from leeway.config import ENV_PREFIX

ROOT = Path(__file__).parents[2]
HELM = ROOT / "deploy" / "helm"
TOOLS = ROOT / ".tools" / "bin"
MAJORS = ("helm3", "helm4")
EXAMPLES = ("laptop", "one-cluster", "two-clouds", "air-gapped")
SIDES = ("trainer", "rollout")
NAMESPACE = "leeway"

Manifest = dict[str, Any]


def tool(name: str) -> str:
    """The path of a command that `make setup-deploy` fetched.

    In CI a missing one is a failure; elsewhere the test says what it would need, and is skipped.
    """
    found = TOOLS / name
    if found.exists():
        return str(found)
    elsewhere = shutil.which(name)
    if elsewhere is not None:
        return elsewhere
    message = f"{name} is not there: run `make setup-deploy`"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def chart(side: str) -> Path:
    return HELM / f"{side}-cluster"


def values_files(example: str, side: str) -> list[Path]:
    return [HELM / "examples" / "run.yaml", HELM / "examples" / example / f"{side}.yaml"]


def helm(
    major: str, *arguments: str | Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [tool(major), *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(environment or {})},
        check=False,
    )


@cache
def render(
    example: str,
    side: str,
    major: str = "helm4",
    version: str = "1.37",
    sets: tuple[str, ...] = (),
) -> tuple[Manifest, ...]:
    """Every manifest of an example, hooks included. Treat them as read-only."""
    files = [f"--values={path}" for path in values_files(example, side)]
    done = helm(
        major,
        "template",
        side,
        chart(side),
        f"--namespace={NAMESPACE}",
        f"--kube-version={version}",
        *files,
        *(f"--set-json={pair}" for pair in sets),
    )
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.safe_load_all(done.stdout) if each)


@dataclass(frozen=True)
class Workload:
    """Something that makes pods."""

    manifest: Manifest
    template: Manifest

    @property
    def name(self) -> str:
        return f"{self.manifest['kind']}/{self.manifest['metadata']['name']}"

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"].get("labels", {})

    @property
    def spec(self) -> Manifest:
        return self.template["spec"]

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def workloads(manifests: tuple[Manifest, ...]) -> list[Workload]:
    found = []
    for each in manifests:
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            found.append(Workload(each, each["spec"]["template"]))
        elif each["kind"] == "LeaderWorkerSet":
            template = each["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            found.append(Workload(each, template))
        elif each["kind"] == "Pod":
            found.append(Workload(each, each))
    return found


def environment(container: Manifest) -> dict[str, str]:
    """What of a container's environment configures Leeway."""
    return {
        each["name"]: each["value"]
        for each in container["env"]
        if each["name"].startswith(ENV_PREFIX) and "value" in each
    }


def of_kind(manifests: tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] in kinds]


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number."""
    units = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    for unit, factor in {**units, "Ti": 2**40}.items():
        if str(text).endswith(unit):
            return float(str(text).removesuffix(unit)) * factor
    return float(text)
