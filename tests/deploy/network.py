"""Two clusters as network namespaces: a bridge each, pods on it, and one link between the routers.

The trainer's router lets in what its endpoint serves. The rollout's hides its pods behind its own
address and lets nothing in. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.charts import ROOT, tool
from tests.deploy.link import DEVICE


def run(*command: str | Path) -> None:
    subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)


class Cluster:
    """A router with a bridge, and pods with addresses of their own."""

    def __init__(self, name: str, network: str) -> None:
        self.router = f"lw{os.getpid()}-{name}"
        self.network = network
        self.namespaces = [self.router]
        self._pods = 0
        run("ip", "netns", "add", self.router)
        for command in (
            "ip link set lo up",
            "ip link add br0 type bridge",
            f"ip addr add {network}.1/24 dev br0",
            "ip link set br0 up",
            "sysctl -qw net.ipv4.ip_forward=1",
        ):
            self._in(self.router, command)

    def add_pod(self) -> tuple[str, str]:
        """The namespace and the address of a new pod."""
        self._pods += 1
        address = f"{self.network}.{self._pods + 1}"
        namespace = f"{self.router}-{self._pods}"
        end = f"p{self._pods}"
        run("ip", "netns", "add", namespace)
        self.namespaces.append(namespace)
        self._in(self.router, f"ip link add {end} type veth peer name eth0 netns {namespace}")
        self._in(self.router, f"ip link set {end} master br0 up")
        for command in (
            "ip link set lo up",
            f"ip addr add {address}/24 dev eth0",
            "ip link set eth0 up",
            f"ip route add default via {self.network}.1",
        ):
            self._in(namespace, command)
        return namespace, address

    def serve(self, port: int, addresses: Sequence[str]) -> None:
        """What comes to the router's outer address at `port` goes to one of the pods."""
        for left in range(len(addresses), 0, -1):
            spread = ["-m", "statistic", "--mode", "nth", "--every", str(left), "--packet", "0"]
            self._iptables(
                *f"-t nat -A PREROUTING -i {DEVICE} -p tcp --dport {port}".split(),
                *(spread if left > 1 else []),
                *f"-j DNAT --to-destination {addresses[left - 1]}:{port}".split(),
            )

    def hide(self) -> None:
        """Network address translation outwards; nothing new comes in."""
        self._iptables(*f"-t nat -A POSTROUTING -o {DEVICE} -j MASQUERADE".split())
        self._iptables(
            *f"-A FORWARD -i {DEVICE} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT".split()
        )
        self._iptables(*f"-A FORWARD -i {DEVICE} -j DROP".split())

    def start(self, *command: str | Path) -> subprocess.Popen[bytes]:
        """Runs a command at the router."""
        return subprocess.Popen(["ip", "netns", "exec", self.router, *map(str, command)])

    def close(self) -> None:
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False)

    def _iptables(self, *arguments: str) -> None:
        run("ip", "netns", "exec", self.router, tool("iptables"), *arguments)

    def _in(self, namespace: str, command: str) -> None:
        run("ip", "netns", "exec", namespace, *command.split())


class Link:
    """The long way between two routers."""

    def __init__(self, trainer: tuple[str, str], rollout: tuple[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, ROOT / "tests/deploy/link.py", *trainer, *rollout],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
