"""Images and docker compose: parsed, and held against what the code and the charts say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from leeway.config import load
from leeway.deploy.credentials import Parts, make, utc_now
from leeway.deploy.folder import Folder
from tests.deploy.charts import HELM, ROOT, SIDES, chart

DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "docker-compose.yaml").read_text())
OURS = ("queue", "trainer", "rollout", "sandbox")


def stages() -> dict[str, list[str]]:
    """The instructions of every stage, by name."""
    joined = re.sub(r"\\\n", " ", DOCKERFILE)
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in joined.splitlines():
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            current = found.setdefault(match[2], [])
        if line and not line.startswith("#"):
            current.append(line)
    return found


def test_every_image_of_the_charts_has_its_stage_and_none_runs_as_root() -> None:
    known = stages()
    for side in SIDES:
        images = yaml.safe_load((chart(side) / "values.yaml").read_text())["images"]
        for name, image in images.items():
            if isinstance(image, dict) and image["repository"].startswith("leeway/"):
                assert image["repository"] == f"leeway/{name}"
                assert "USER 65532:65532" in known[name]
                assert 'ENTRYPOINT ["leeway"]' in known[name]
                assert any("HEALTHCHECK" in line for line in known[name])


def test_bases_are_pinned_and_nothing_is_kept_that_only_the_build_needs() -> None:
    for line in re.findall(r"^ARG \w+=(\S+)$", DOCKERFILE, re.M):
        assert re.search(r":[^:]*\d+\.\d+|@sha256:", line), line
        assert not line.endswith(":latest")
    for name in OURS:
        text = "\n".join(stages()[name])
        assert "--no-cache-dir" in text and "rm -rf /tmp/wheels" in text
        assert "constraint" in text


def test_what_the_build_copies_is_there_and_let_through() -> None:
    let_through = (ROOT / ".dockerignore").read_text().splitlines()
    for line in stages()["wheels"]:
        if line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in let_through


def test_extras_that_images_install_exist() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for names in re.findall(r"whl\)\[([a-z,]+)\]", DOCKERFILE):
        assert set(names.split(",")) <= set(extras)


@pytest.mark.parametrize("name", OURS)
def test_compose_gives_leeway_what_it_takes(name: str) -> None:
    service = COMPOSE["services"][name]
    environment = {key: str(value) for key, value in service["environment"].items()}
    config = load(DOCKER / "run.yaml", environ=environment)
    assert config.security.asks_for_certificates
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["user"] == "65532:65532"
    assert "ports" not in service
    assert service["command"][0] == name
    made = make(Parts("leeway", ("leeway-trainer-cluster",)), {}, utc_now())
    for path in re.findall(r"/leeway/secrets/(\S+?)(?:'|$|\s)", "\n".join(environment.values())):
        secret, _, key = path.partition("/")
        assert key in made[secret], path


def test_compose_gives_a_sandbox_its_own_secret_and_no_way_out() -> None:
    service = COMPOSE["services"]["sandbox"]
    volume, config = service["volumes"]
    assert volume["volume"] == {"subpath": "leeway-sandbox-tls"} and config.endswith(":ro")
    made = make(Parts("leeway", ("leeway-trainer-cluster",)), {}, utc_now())
    for kind in ("AUTHORITY", "CERTIFICATE", "KEY"):
        path = Path(service["environment"][f"LEEWAY__SECURITY__{kind}"])
        assert str(path.parent) == volume["target"] and path.name in made["leeway-sandbox-tls"]
    assert service["networks"] == ["sandbox"]
    assert COMPOSE["networks"]["sandbox"] == {"internal": True}
    node = COMPOSE["services"]["rollout"]
    assert set(node["networks"]) == {"default", "sandbox"}
    assert node["environment"]["LEEWAY__ROLLOUT__SANDBOX__ADDRESS"] == "sandbox:7003"


def test_compose_starts_redis_as_the_queue_needs_it() -> None:
    command = " ".join(COMPOSE["services"]["redis"]["command"])
    for setting in ("appendonly yes", "maxmemory-policy noeviction", "rdbcompression no", "port 0"):
        assert f"--{setting}" in command
    assert set(COMPOSE["volumes"]) >= {"secrets", "redis", "runs"}


def test_secrets_as_files_stay_and_are_renewed(tmp_path: Path) -> None:
    parts, folder = Parts("leeway", ("a",)), Folder(tmp_path)
    made = make(parts, folder.read([]), utc_now())
    for name, data in made.items():
        folder.write(name, data)
    assert folder.read(list(made)) == made
    assert make(parts, folder.read(list(made)), utc_now()) == {}


def test_versions_agree() -> None:
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for side in SIDES:
        facts = yaml.safe_load((HELM / f"{side}-cluster" / "Chart.yaml").read_text())
        assert facts["appVersion"] == version
    for name in OURS:
        assert COMPOSE["services"][name]["image"] == f"leeway/{name}:{version}"
