"""The client of `benchmarks.gateway`, a process of its own that imports little.

    python benchmarks/gateway_client.py URL ROUNDS TOKENS < keys.json

Each key is a session that asks ROUNDS times, one by one; prints each request's seconds, and all.
"""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me a story about the number {number}."}]


def ask(url: str, key: str, number: int, rounds: int, tokens: int) -> list[float]:
    """From a request's first byte sent until its answer's last is there, on one connection: what a
    client does before and after is not the gateway's."""
    address = urllib.parse.urlsplit(url)
    seconds = []
    with socket.create_connection((address.hostname, address.port), timeout=600) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for turn in range(rounds):
            body = {"messages": question(1000 * turn + number), "max_tokens": tokens}
            content = json.dumps(body).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
                f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(content)}\r\n\r\n"
            )
            started = time.perf_counter()
            connection.sendall(head.encode() + content)
            status, answer = _read(connection)
            seconds.append(time.perf_counter() - started)
            if status != 200:
                raise SystemExit(answer.decode())
    return seconds


def _read(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the body of one response."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += _received(connection)
    head, body = data[:end].lower(), data[end + 4 :]
    length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += _received(connection)
    return int(head.split()[1]), body


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise SystemExit("the gateway closed the connection")
    return data


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
