"""Agents for environments that others wrote: each is named by `task.agent` and driven by columns.

`task.agent: rollout_service.adapters:verifiers` runs an environment of the `verifiers` library, as
it is, against the session's own endpoint. A row names it: {"prompt": ..., "environment": "gsm8k",
"environment_args": {...}, "answer": ..., "info": {...}}. Environments of Gymnasium's form need no
adapter (`task.environment`), and reasoning-gym is a source of tasks (`task.reasoning_gym`).
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any


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
