"""Environments that others wrote, driven by columns of the row.

`task.agent: rollout_service.adapters:verifiers` runs an environment of the `verifiers` library, as
it is, against the session's own endpoint. A row names it: {"prompt": ..., "environment": "gsm8k",
"environment_args": {...}, "answer": ..., "info": {...}}.

`task.environment: rollout_service.adapters:OpenEnv` plays an episode on an OpenEnv server that runs
elsewhere. A row names it: {"prompt": ..., "environment": "http://...", "reset": {...}}.

Environments of Gymnasium's form need no adapter (`task.environment`), and reasoning-gym is a source
of tasks (`task.reasoning_gym`).
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from functools import lru_cache
from typing import Any

from leeway.errors import InfrastructureError

# Of one reset or step; `task.environment_seconds` kills what takes longer as a whole.
_OPENENV_SECONDS = 600.0
_OPENENV_CLOSE_SECONDS = 5.0
_OPENENV_BYTES = 4 << 20
# What every OpenEnv action and observation has besides its own fields.
_OPENENV_COMMON = ("metadata", "done", "reward")


async def verifiers(task: Any, session: Any) -> dict[str, float]:
    """The environment's reward as the score, and its metrics as parts."""
    import openai
    from verifiers.legacy import OpenAIChatCompletionsClient

    columns = task.columns
    environment = _environment(
        columns["environment"], json.dumps(columns.get("environment_args", {}), sort_keys=True)
    )
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        output = await environment.run_rollout(
            {
                "prompt": task.messages,
                "example_id": task.index,
                "answer": columns.get("answer", ""),
                "info": columns.get("info", {}),
            },
            OpenAIChatCompletionsClient(client),
            "policy",
            {},
        )
    if output.get("error") is not None:
        raise RuntimeError(str(output["error"]))
    metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
    return {**metrics, "score": float(output["reward"])}


@lru_cache(maxsize=8)
def _environment(name: str, arguments: str) -> Any:
    from verifiers.legacy import load_environment

    return load_environment(name, **json.loads(arguments))


class OpenEnv:
    """An episode on an OpenEnv server, over its WebSocket: a session there is an episode here.

    OpenEnv's own client comes with a web framework and its pins; what is used of its protocol are
    three messages (`openenv.core.env_server`, 0.3).

    The model's text is the action's only text field, where it has one; otherwise it must be a JSON
    object. What the server refuses as no action is told to the model. An observation of one field
    is shown as its text, another as JSON.
    """

    def __init__(self) -> None:
        self._socket: Any = None
        self._text_field: str | None = None

    def reset(self, environment: str, reset: dict[str, Any] | None = None) -> str:
        """Args:
        environment: The server's URL.
        reset: What its `reset` takes, e.g. {"seed": 1}.

        Raises:
            InfrastructureError: it is away, or has no room for another session.
        """
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        url = environment.rstrip("/")
        try:
            with urllib.request.urlopen(f"{url}/schema", timeout=_OPENENV_SECONDS) as answer:
                self._text_field = _only_text_field(json.loads(answer.read(_OPENENV_BYTES)))
            self._socket = connect(
                url.replace("http", "ws", 1) + "/ws", max_size=_OPENENV_BYTES, proxy=None
            )
        except (OSError, WebSocketException) as error:
            raise InfrastructureError(f"{url}: {error!r}") from error
        return _shown(self._ask("reset", reset or {})["observation"])

    def step(self, action: str) -> tuple[str, float | None, bool]:
        """Raises:
        InfrastructureError: the connection broke.
        RuntimeError: the environment did.
        """
        try:
            given = {self._text_field: action} if self._text_field else json.loads(action)
        except ValueError as error:
            return f"error: answer with a JSON object: {error}", None, False
        try:
            data = self._ask("step", given)
        except _NoActionError as error:
            return f"error: {error}", None, False
        return _shown(data["observation"]), data.get("reward"), bool(data.get("done"))

    def close(self) -> None:
        """Waits for the server to end the session, so that its place is free for the next."""
        from websockets.exceptions import WebSocketException

        if self._socket is None:
            return
        with contextlib.suppress(OSError, WebSocketException):
            self._socket.send(json.dumps({"type": "close"}))
            while True:
                self._socket.recv(timeout=_OPENENV_CLOSE_SECONDS)
        self._socket.close()

    def _ask(self, kind: str, data: Any) -> dict[str, Any]:
        from websockets.exceptions import WebSocketException

        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(timeout=_OPENENV_SECONDS))
        except (OSError, WebSocketException) as error:
            raise InfrastructureError(f"OpenEnv {kind}: {error!r}") from error
        result: dict[str, Any] = answer["data"]
        if answer["type"] != "error":
            return result
        if result.get("code") == "VALIDATION_ERROR" and kind == "step":
            faults = [f"{fault['loc']}: {fault['msg']}" for fault in result.get("errors", ())]
            raise _NoActionError("; ".join(faults) or result["message"])
        if result.get("code") in ("CAPACITY_REACHED", "SESSION_ERROR", "FACTORY_ERROR"):
            raise InfrastructureError(f"OpenEnv {kind}: {result['message']}")
        raise RuntimeError(f"OpenEnv {kind}: {result['message']} ({result.get('code')})")


class _NoActionError(Exception):
    """What the model said is no action of the environment."""


def _only_text_field(schema: dict[str, Any]) -> str | None:
    fields = schema["action"].get("properties", {})
    own = {name: field for name, field in fields.items() if name not in _OPENENV_COMMON}
    texts = [name for name, field in own.items() if field.get("type") == "string"]
    return texts[0] if len(own) == len(texts) == 1 else None


def _shown(observation: dict[str, Any]) -> str:
    own = {name: value for name, value in observation.items() if name not in _OPENENV_COMMON}
    values = list(own.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(own)
