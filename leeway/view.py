"""`leeway view`: recorded trajectories as a web page, for people who debug by reading.

Reads runs/<name>/trajectories and serves them on loopback, with one page (`view.html`) that needs
nothing else. Nothing is computed but text: what the page colours by is what was recorded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from leeway.errors import ConfigError, WireError
from leeway.trajectory import Group, Trajectory
from leeway.v1 import trajectory_pb2 as pb

Decode = Callable[[int], str]
"""The text of one token id."""


def read_group(path: Path) -> Group:
    """Raises `WireError` when the file holds no group."""
    message = pb.Group()
    try:
        message.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise WireError(f"{path}: not a recorded group: {error}") from error
    return Group.from_wire(message)


def describe(group: Group, decode: Decode) -> dict[str, Any]:
    """A group as the page shows it."""
    return {
        "task": {
            "id": group.task.task_id,
            "messages": [dict(message) for message in group.task.messages],
            "columns": dict(group.task.columns),
        },
        "trajectories": [_trajectory(t, decode) for t in group.trajectories],
    }


def _trajectory(trajectory: Trajectory, decode: Decode) -> dict[str, Any]:
    prompt = trajectory.prompt_length
    mask = np.concatenate([np.zeros(prompt, dtype=np.bool_), trajectory.loss_mask])
    versions = [None] * prompt + trajectory.token_versions().tolist()
    ratios = trajectory.extras.get("log_ratios")
    return {
        "id": trajectory.trajectory_id,
        "index": trajectory.index,
        "reward": trajectory.reward,
        "score": trajectory.score,
        "parts": dict(trajectory.reward_parts),
        "finish": trajectory.finish_reason.name.lower(),
        "seconds": trajectory.generation_seconds,
        "node": trajectory.node_id,
        "temperature": trajectory.sampling.temperature,
        "branches": [[b.start, b.stop] for b in trajectory.branches()],
        "tokens": [decode(int(token)) for token in trajectory.token_ids],
        "mask": mask.astype(int).tolist(),
        "version": [v if m else None for v, m in zip(versions, mask, strict=True)],
        "logprob": _column(trajectory, trajectory.logprobs, mask),
        "advantage": _column(trajectory, trajectory.extras.get("advantages"), mask),
        "ratio": _column(trajectory, None if ratios is None else np.exp(ratios), mask),
        "turn_reward": _column(trajectory, trajectory.extras.get("turn_rewards"), mask),
    }


def _column(
    trajectory: Trajectory, values: npt.NDArray[Any] | None, mask: npt.NDArray[np.bool_]
) -> list[float | None]:
    """One value a token; None where none was recorded."""
    if values is None:
        return [None] * trajectory.token_ids.size
    everywhere = [math.nan] * trajectory.prompt_length + values.astype(float).tolist()
    return [
        float(f"{value:.5g}") if trained and math.isfinite(value) else None
        for value, trained in zip(everywhere, mask, strict=True)
    ]


def server(run: Path, decode: Decode, port: int = 0) -> ThreadingHTTPServer:
    """Serves a run's trajectories on loopback once `serve_forever` is called.

    Raises:
        ConfigError: the run recorded none.
    """
    folder = run / "trajectories"
    if not any(folder.glob("*.pb")):
        raise ConfigError(
            f"{folder}: no trajectories are recorded there; give the directory of a run that has "
            "trained at least once, e.g. runs/quickstart"
        )
    page = resources.files("leeway").joinpath("view.html").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == "/":
                self._send(page, "text/html; charset=utf-8")
            elif path == "/groups":
                self._send(_json([file.stem for file in sorted(folder.glob("*.pb"))]))
            elif path.startswith("/groups/"):
                file = folder / f"{Path(path).name}.pb"
                if file.is_file():
                    self._send(_json(describe(read_group(file), decode)))
                else:
                    self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _send(self, body: bytes, kind: str = "application/json") -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """A page's requests are no news."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
