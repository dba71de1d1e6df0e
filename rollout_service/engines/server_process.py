"""A server that a node owns: started on a free port, ended with the node, its output kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from leeway.errors import ConfigError

# SIGTERM lets a server free its devices.
_STOP_SECONDS = 20.0


@asynccontextmanager
async def server_process(
    command: Sequence[str], model: Path, log: Path
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Runs the command, in which {model} and {port} are filled in; yields its URL.

    Raises:
        ConfigError: there is no such command.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    filled = [part.format(model=model, port=port) for part in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *filled,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"rollout.engine.command = {command}: {error}") from error
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """With all its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
