"""What users might write: environments and agents, good and bad."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import openai


class Adder:
    """Tools: the model calls `add`, and is scored by its last words."""

    def reset(self, answer: str = "7") -> str:
        self.answer = answer
        return "add 3 4"

    def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

    def score(self, completion: str) -> dict[str, float]:
        return {"score": float(completion == f"It is {self.answer}."), "length": len(completion)}


class Strict(Adder):
    """Its tool takes nothing that the model sends."""

    def add(self, a: bool, b: list[str]) -> str:
        return "never"


class Broken(Adder):
    def add(self, a: int, b: int) -> str:
        raise ZeroDivisionError("in the tool")


class Hangs(Adder):
    def add(self, a: int, b: int) -> str:
        time.sleep(60)
        return "late"


class Dies(Adder):
    def add(self, a: int, b: int) -> str:
        os._exit(3)


class Hungry(Adder):
    def add(self, a: int, b: int) -> str:
        return str(len(bytearray(2 << 30)))


class Floods(Adder):
    def add(self, a: int, b: int) -> str:
        return "x" * (5 << 20)


class Untyped(Adder):
    def add(self, a, b):  # type: ignore[no-untyped-def]
        return "never"


class Walk:
    """step(action): each letter is rewarded, three steps are an episode."""

    def reset(self) -> None:
        self.steps = 0

    def step(self, action: str) -> tuple[str, float, bool]:
        self.steps += 1
        return f"step {self.steps}", 0.25 * self.steps, self.steps == 3


async def good(task: Any, session: Any) -> float:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        answer = await client.chat.completions.create(model="m", messages=task.messages)
    print("printing is fine")
    return float("tool_call" in (answer.choices[0].message.content or ""))


async def parts(task: Any, session: Any) -> dict[str, float]:
    await good(task, session)
    return {"score": 1, "reward": 0.5, "format": 0.25, "index": task.index}


async def says_nothing(task: Any, session: Any) -> None:
    await good(task, session)


async def asks_nobody(task: Any, session: Any) -> float:
    return 1.0


async def raises(task: Any, session: Any) -> float:
    raise LookupError("in the agent")


async def returns_text(task: Any, session: Any) -> Any:
    await good(task, session)
    return "1.0"


async def waits(task: Any, session: Any) -> float:
    await good(task, session)
    await asyncio.sleep(60)
    return 1.0


async def blocks_sometimes(task: Any, session: Any) -> float:
    if task.index == 1:
        time.sleep(60)
    return await good(task, session)


def not_async(task: Any, session: Any) -> float:
    return 1.0
