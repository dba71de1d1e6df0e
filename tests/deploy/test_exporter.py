"""The exporter that the chart puts beside Redis, with the chart's own environment and Secret."""

from __future__ import annotations

import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leeway.deploy.credentials import Parts, make, utc_now
from leeway.local import free_addresses
from tests.deploy.charts import of_kind, render, tool
from tests.waiting import until

SECONDS = 20.0


@contextmanager
def started(
    command: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(SECONDS)


def read(url: str) -> dict[str, str]:
    """Samples by name."""
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            lines = answer.read().decode().splitlines()
    except (urllib.error.URLError, ConnectionError):
        return {}
    return dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))


def test_it_reads_redis_with_the_password_and_over_tls(tmp_path: Path) -> None:
    redis, served = (address.rpartition(":")[2] for address in free_addresses(2))
    secret, data = tmp_path / "secret", tmp_path / "data"

    def here(text: str) -> str:
        paths = text.replace("/leeway/redis", str(secret)).replace("dir /data", f"dir {data}")
        return paths.replace("6379", redis).replace("0.0.0.0:9121", f"127.0.0.1:{served}")

    for folder in (secret, data):
        folder.mkdir()
    credentials = make(Parts("trainer", ("trainer",)), {}, utc_now())
    for name, content in credentials["trainer-redis-tls"].items():
        (secret / name).write_text(here(content.decode()))
    manifests = render("one-cluster", "trainer")
    (config,) = [m for m in of_kind(manifests, "ConfigMap") if "redis.conf" in m["data"]]
    (tmp_path / "redis.conf").write_text(here(config["data"]["redis.conf"]) + "bind 127.0.0.1\n")
    (stateful,) = [
        m for m in of_kind(manifests, "StatefulSet") if m["metadata"]["name"].endswith("-redis")
    ]
    (container,) = [
        c for c in stateful["spec"]["template"]["spec"]["containers"] if c["name"] == "exporter"
    ]
    environment = {each["name"]: here(each["value"]) for each in container["env"]}
    health = container["livenessProbe"]["httpGet"]["path"]
    log, address = tmp_path / "exporter.log", f"http://127.0.0.1:{served}"

    def up() -> str | None:
        return read(f"{address}/metrics").get("redis_up")

    with started([tool("redis-exporter")], log, environment):
        # Alive, and says that it sees no Redis.
        until(lambda: up() == "0", "its first answer", SECONDS, log.read_text)
        with urllib.request.urlopen(address + health, timeout=5.0) as answer:
            assert answer.status == 200
        server = [tool("redis-server"), str(tmp_path / "redis.conf")]
        with started(server, tmp_path / "redis.log"):
            until(lambda: up() == "1", "it sees Redis", SECONDS, log.read_text)
            found = read(f"{address}/metrics")
    assert float(found["redis_aof_enabled"]) == 1.0
    assert float(found["redis_memory_max_bytes"]) == 6 * 2**30
