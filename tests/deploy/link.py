"""The link between two clusters, as a process: delays and loses packets, and can be cut.

It holds one TUN device in each of two network namespaces and passes packets on. It does what
`tc netem` would; many kernels are built without that. Commands come on standard input:
`delay MILLISECONDS`, `loss PERCENT`, `cut`, `mend`.

    python link.py NAMESPACE ADDRESS NAMESPACE ADDRESS
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 1500
# What lies in the link at most; beyond, packets are dropped, as by any router.
_MOST_PACKETS = 20_000
DEVICE = "wan0"


def device(namespace: str, address: str) -> int:
    """A TUN device inside of a namespace; the descriptor works from anywhere."""
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (f"addr add {address}/24 dev {DEVICE}", f"link set {DEVICE} up"):
        subprocess.run(["ip", *command.split()], check=True)
    return descriptor


def main(first: tuple[str, str], second: tuple[str, str]) -> None:
    ends = [device(*first), device(*second)]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    random.seed(0)
    delay, loss, cut = 0.0, 0.0, False
    flying: list[tuple[float, int, int, bytes]] = []
    numbers = count()
    print("ready", flush=True)
    while True:
        wait = max(0.0, flying[0][0] - time.monotonic()) if flying else 1.0
        readable, _, _ = select.select([*ends, sys.stdin], [], [], wait)
        now = time.monotonic()
        while flying and flying[0][0] <= now:
            _, _, end, packet = heapq.heappop(flying)
            os.write(end, packet)
        for source in readable:
            if source is sys.stdin:
                words = sys.stdin.readline().split()
                if not words:
                    return
                delay = float(words[1]) / 1000 if words[0] == "delay" else delay
                loss = float(words[1]) / 100 if words[0] == "loss" else loss
                cut = words[0] == "cut" or (cut and words[0] != "mend")
                continue
            packet = os.read(source, 2 * _MTU)
            if cut or random.random() < loss or len(flying) >= _MOST_PACKETS:
                continue
            heapq.heappush(flying, (now + delay, next(numbers), other[source], packet))


if __name__ == "__main__":
    main((sys.argv[1], sys.argv[2]), (sys.argv[3], sys.argv[4]))
