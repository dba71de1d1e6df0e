"""The client of `benchmarks.gateway`, a process of its own that imports little.

    python benchmarks/gateway_client.py URL ROUNDS TOKENS < keys.json

Each key is a session that asks ROUNDS times, one by one; prints each request's seconds, and all.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me a story about the number {number}."}]


def ask(url: str, key: str, number: int, rounds: int, tokens: int) -> list[float]:
    """Through the plainest client, on one connection: an SDK's own work is not the gateway's."""
    host = urllib.parse.urlsplit(url).netloc
    seconds = []
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with contextlib.closing(http.client.HTTPConnection(host, timeout=600)) as connection:
        for turn in range(rounds):
            body = {"messages": question(1000 * turn + number), "max_tokens": tokens}
            started = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise SystemExit(text.decode())
            seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    url, rounds, tokens = sys.argv[1:]
    keys = json.loads(sys.stdin.read())
    started = time.perf_counter()
    with ThreadPoolExecutor(len(keys)) as threads:
        sessions = [
            threads.submit(ask, url, key, number, int(rounds), int(tokens))
            for number, key in enumerate(keys)
        ]
        seconds = [value for session in sessions for value in session.result()]
    print(json.dumps({"seconds": seconds, "wall": time.perf_counter() - started}))
