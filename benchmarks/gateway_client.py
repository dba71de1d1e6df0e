"""The client of `benchmarks.gateway`, a process of its own that imports little.

    python benchmarks/gateway_client.py URL ROUNDS TOKENS < keys.json

Each key is a session that asks ROUNDS times, one by one; prints each request's seconds, and all.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import httpx2 as httpx


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me a story about the number {number}."}]


async def ask(url: str, keys: list[str], rounds: int, tokens: int) -> list[float]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:

        async def session(number: int, key: str) -> list[float]:
            seconds = []
            headers = {"Authorization": f"Bearer {key}"}
            for turn in range(rounds):
                body = {"messages": question(1000 * turn + number), "max_tokens": tokens}
                started = time.perf_counter()
                answer = await http.post("/v1/chat/completions", json=body, headers=headers)
                answer.raise_for_status()
                seconds.append(time.perf_counter() - started)
            return seconds

        per_session = await asyncio.gather(*(session(i, key) for i, key in enumerate(keys)))
    return [value for values in per_session for value in values]


if __name__ == "__main__":
    url, rounds, tokens = sys.argv[1:]
    keys = json.loads(sys.stdin.read())
    started = time.perf_counter()
    seconds = asyncio.run(ask(url, keys, int(rounds), int(tokens)))
    print(json.dumps({"seconds": seconds, "wall": time.perf_counter() - started}))
