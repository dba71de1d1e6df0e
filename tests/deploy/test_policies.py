"""checkov on what the charts render: nothing fails without a reason that is written down here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.charts import EXAMPLES, SIDES, render, tool

# The only checks that may fail, where, and why.
ALLOWED = {
    ("CKV_K8S_43", ""): "a digest belongs to the images that somebody publishes: images.*.digest",
    ("CKV_K8S_15", ""): "a tag here is a release, which is never published twice: IfNotPresent",
    ("CKV_K8S_8", "Pod."): "the check of `helm test` runs once and ends",
    ("CKV_K8S_9", "Pod."): "the check of `helm test` runs once and ends",
    ("CKV2_K8S_6", "Pod."): "the check of `helm test` looks at what policies allow to everybody",
}


def test_every_failed_check_has_its_reason(tmp_path: Path) -> None:
    for example in EXAMPLES:
        for side in SIDES:
            # LeaderWorkerSets are unknown to checkov; as StatefulSets the same pods are not.
            sets = ("trainer.leaderWorkerSet=false",) if side == "trainer" else ()
            text = yaml.safe_dump_all(render(example, side, sets=sets))
            (tmp_path / f"{example}-{side}.yaml").write_text(text)
    failed = _failed(tmp_path)
    used = set()
    for check, resource, name in failed:
        reasons = [key for key in ALLOWED if key[0] == check and resource.startswith(key[1])]
        assert reasons, f"{check} {name}: {resource}"
        used |= set(reasons)
    assert used == set(ALLOWED), f"reasons that nothing needs any more: {set(ALLOWED) - used}"


def test_checkov_finds_what_is_wrong(tmp_path: Path) -> None:
    """The proof above is worth something only if a worse chart would fail it."""
    manifests = json.loads(json.dumps(render("laptop", "rollout")))
    (deployment,) = [each for each in manifests if each["kind"] == "Deployment"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["securityContext"]["readOnlyRootFilesystem"] = False
    (tmp_path / "worse.yaml").write_text(yaml.safe_dump_all(manifests))
    assert any(check == "CKV_K8S_22" for check, _, _ in _failed(tmp_path))


def test_images_can_be_pinned_by_digest() -> None:
    digest = f"sha256:{'0' * 64}"
    sets = tuple(f'images.{n}.digest="{digest}"' for n in ("queue", "trainer", "redis"))
    for manifest in render("laptop", "trainer", sets=sets):
        text = json.dumps(manifest)
        if '"image":' in text:
            assert text.count('"image":') == text.count(f"@{digest}")


def _failed(directory: Path) -> list[tuple[str, str, str]]:
    """(check, resource, name) of what failed."""
    command = [tool("checkov"), "--directory", directory, "--framework", "kubernetes"]
    done = subprocess.run(
        [*map(str, command), "--output", "json", "--quiet", "--skip-download"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        pytest.fail(f"checkov: {done.stdout[-500:]}{done.stderr[-500:]}")
    return [
        (each["check_id"], each["resource"], each["check_name"])
        for each in report["results"]["failed_checks"]
    ]
