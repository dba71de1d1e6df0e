"""Runs the pods of rendered charts as processes: what a kubelet would do with them, near enough.

Each container gets its own network namespace, a read-only root with its volumes where the chart
mounts them, the chart's user, command and environment, and no privileges. What ends is started
again. Files of Secrets, ConfigMaps and claims are directories here.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.charts import ROOT, TOOLS, Manifest, Workload

_USER = 65532
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib64", "etc", "opt", "proc", "dev")
# One of the system's directories in the new root; a link stays a link.
_SHARE = (
    "if [ -L /{name} ]; then cp -a /{name} {root}/; "
    "elif [ -d /{name} ]; then mkdir {root}/{name}; mount --rbind /{name} {root}/{name}; fi"
)
_RESTART_SECONDS = 1.0


@dataclass
class Storage:
    """What volumes are made of, below one directory."""

    directory: Path
    config_maps: Mapping[str, Mapping[str, str]]
    secrets: Mapping[str, Mapping[str, bytes]]
    claims: Mapping[str, Path] = field(default_factory=dict)

    def path(self, pod: str, volume: Manifest) -> Path:
        """The directory behind a pod's volume."""
        if "configMap" in volume:
            files = {
                name: text.encode()
                for name, text in self.config_maps[volume["configMap"]["name"]].items()
            }
            return self._files(f"{pod}-{volume['name']}", files)
        if "secret" in volume:
            return self._files(f"{pod}-{volume['name']}", self._secret(volume["secret"]))
        if "projected" in volume:
            merged: dict[str, bytes] = {}
            for part in volume["projected"]["sources"]:
                merged |= self._secret({**part["secret"], "secretName": part["secret"]["name"]})
            return self._files(f"{pod}-{volume['name']}", merged)
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            return self.claims.get(claim) or self._empty(f"claim-{claim}")
        assert "emptyDir" in volume, volume
        return self._empty(f"{pod}-{volume['name']}")

    def claim(self, pod: str, name: str) -> Path:
        """Of a StatefulSet's template."""
        return self._empty(f"claim-{name}-{pod}")

    def _secret(self, source: Manifest) -> dict[str, bytes]:
        secret = self.secrets[source["secretName"]]
        items = source.get("items", [{"key": key, "path": key} for key in secret])
        return {item["path"]: secret[item["key"]] for item in items}

    def _files(self, name: str, files: Mapping[str, bytes]) -> Path:
        directory = self._empty(name)
        for file, content in files.items():
            (directory / file).write_bytes(content)
            (directory / file).chmod(0o444)
        return directory

    def _empty(self, name: str) -> Path:
        directory = self.directory / name
        directory.mkdir(parents=True, exist_ok=True)
        os.chown(directory, _USER, _USER)
        return directory


class Pod:
    """One pod, in a namespace of its own; starts at once, and again whenever it ends."""

    def __init__(
        self,
        name: str,
        workload: Workload,
        storage: Storage,
        network: tuple[str, str],
        hosts: Mapping[str, list[str]],
    ) -> None:
        self.name, self.address = name, network[1]
        self.restarts = 0
        self._namespace = network[0]
        self.log = storage.directory / f"{name}.log"
        (container,) = workload.containers
        self._container = container
        self._environment = _environment(name, self.address, container)
        self._script = _script(name, workload, container, storage, hosts, self._environment)
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def ready(self) -> bool:
        """What its readiness probe says."""
        probe = self._container["readinessProbe"]
        if "httpGet" in probe:
            return self.get(probe["httpGet"]["path"])[0] == 200
        return self.run(probe["exec"]["command"]).returncode == 0

    def get(self, path: str, port: int = 9100) -> tuple[int, str]:
        """An HTTP answer of the pod, asked for in its own namespace."""
        code = (
            "import sys, urllib.request, urllib.error\n"
            f"try: r = urllib.request.urlopen('http://127.0.0.1:{port}{path}', timeout=5)\n"
            "except urllib.error.HTTPError as e: r = e\n"
            "except OSError: sys.exit('0')\n"
            "print(r.status); print(r.read().decode())"
        )
        command = ["ip", "netns", "exec", self._namespace, sys.executable, "-S", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        status, _, body = done.stdout.partition("\n")
        return int(status or 0), body

    def said(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"--- {self.name}, {self.restarts} restarts", *lines])

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Another command in the same container."""
        enter = self._enter(self._script.replace("@COMMAND@", shlex.join(command)))
        return subprocess.run(enter, capture_output=True, text=True, timeout=120, check=False)

    def kill(self) -> None:
        """The machine below it is gone; nothing comes back."""
        self._stopping.set()
        self._signal(signal.SIGKILL)
        self._keeper.join()

    def stop(self, seconds: float) -> int:
        """What a kubelet does to a pod that must go; its exit code."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            return self._process.wait()
        finally:
            self._keeper.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            return
        if number is signal.SIGKILL:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    def _start(self) -> None:
        words = [*self._container["command"], *self._container.get("args", [])]
        command = shlex.join(_resolved(word, self._environment) for word in words)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._enter(self._script.replace("@COMMAND@", command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _enter(self, script: str) -> list[str]:
        namespaces = ["unshare", "--mount", "--propagation", "private"]
        return ["ip", "netns", "exec", self._namespace, *namespaces, "bash", "-euc", script]

    def _keep(self) -> None:
        while not self._stopping.is_set():
            assert self._process is not None
            self._process.wait()
            if self._stopping.wait(_RESTART_SECONDS):
                return
            self.restarts += 1
            self._start()


def _script(
    pod: str,
    workload: Workload,
    container: Manifest,
    storage: Storage,
    hosts: Mapping[str, list[str]],
    environment: Mapping[str, str],
) -> str:
    """A shell script that builds the container's root and runs @COMMAND@ in it."""
    root = storage.directory / f"{pod}-root"
    root.mkdir(exist_ok=True)
    lines = [f"mount -t tmpfs tmpfs {root}", *(_SHARE.format(name=n, root=root) for n in _SYSTEM)]
    hosts_file = storage.directory / f"{pod}-hosts"
    entries = [f"{address} {name}" for name, several in hosts.items() for address in several]
    hosts_file.write_text("\n".join(["127.0.0.1 localhost", *entries, ""]))
    lines.append(f"mount --bind {hosts_file} {root}/etc/hosts")
    # Nothing answers there, at once: the machine's own server is out of reach, which takes seconds.
    nameservers = storage.directory / f"{pod}-resolv.conf"
    nameservers.write_text("nameserver 127.0.0.1\n")
    lines.append(f"mount --bind {nameservers} {root}/etc/resolv.conf")
    volumes = {volume["name"]: volume for volume in workload.spec["volumes"]}
    for mount in container["volumeMounts"]:
        volume = volumes.get(mount["name"])
        source = storage.path(pod, volume) if volume else storage.claim(pod, mount["name"])
        target = f"{root}{mount['mountPath']}"
        lines.append(f"mkdir -p {target}; mount --bind {source} {target}")
        if mount.get("readOnly"):
            lines.append(f"mount -o remount,bind,ro {target}")
    # After the volumes: a pod's own /tmp must not hide a checkout that lies in this machine's.
    visible = {ROOT, Path(sys.base_prefix), Path(sys.prefix).resolve()}
    lines += [
        f"mkdir -p {root}{path}; mount --bind -o ro {path} {root}{path}"
        for path in sorted(p for p in visible if p.parts[1] not in _SYSTEM)
    ]
    lines.append(f"mount -o remount,ro {root}")
    exports = {**_machine(), **environment}
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in exports.items())
    drop = "--no-new-privs --bounding-set=-all --inh-caps=-all"
    user = f"--reuid={_USER} --regid={_USER} --clear-groups"
    lines.append(f"exec chroot {root} setpriv {user} {drop} env -i {variables} @COMMAND@")
    return "\n".join(lines)


def _environment(pod: str, address: str, container: Manifest) -> dict[str, str]:
    """As Kubernetes resolves it: fields of the pod, and references to earlier variables."""
    fields = {"metadata.name": pod, "status.podIP": address}
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        if "valueFrom" in variable:
            found[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[variable["name"]] = _resolved(variable["value"], found)
    return found


def _resolved(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda name: variables.get(name[1], name[0]), text)


def _machine() -> dict[str, str]:
    """What an image would bring, and what keeps a small machine quick."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{TOOLS}:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


def decoded(secret: Manifest) -> dict[str, bytes]:
    return {key: base64.b64decode(value) for key, value in secret["data"].items()}
