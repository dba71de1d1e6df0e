"""An API server of Kubernetes in memory: enough for both majors of Helm, and for kubectl.

It keeps objects, refuses what the strict schemas refuse, watches, and reports every workload as
ready: nothing really runs. `python kube_api.py PORT [VERSION]`, or `serving(...)` in a test.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml

from tests.deploy import kube_discovery, kube_patch, kube_protobuf, schemas
from tests.deploy.kube_discovery import Resource, resources

Object = dict[str, Any]
Key = tuple[str, str, str | None, str]
"""Group and version, plural, namespace, name."""


# What the API server fills in, and clients rely on.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Deployment": {"replicas": 1},
    "StatefulSet": {"replicas": 1},
    "Service": {"clusterIP": "10.0.0.1"},
}


class RefusedError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass
class Watcher:
    resource: Resource
    namespace: str | None
    query: dict[str, list[str]]
    events: list[Object] = field(default_factory=list)
    news: threading.Event = field(default_factory=threading.Event)


class Cluster:
    """The objects, and who watches them."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.resources = {(r.group_version, r.plural): r for r in resources()}
        self.objects: dict[Key, Object] = {}
        self.lock = threading.RLock()
        self.requests: list[str] = []
        self._watchers: list[Watcher] = []
        self._version = 0
        namespaces = self.resources["v1", "namespaces"]
        for name in ("default", "kube-system", "leeway"):
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            self.put(namespaces, None, namespace, dry_run=False)

    def of_kind(self, kind: str) -> list[Object]:
        return [each for each in self.objects.values() if each["kind"] == kind]

    def selected(
        self, resource: Resource, namespace: str | None, query: dict[str, list[str]]
    ) -> list[Object]:
        return [
            each
            for (version, plural, where, _), each in sorted(
                self.objects.items(), key=lambda item: str(item[0])
            )
            if (version, plural) == (resource.group_version, resource.plural)
            and namespace in (None, where)
            and _matches(each, query)
        ]

    def put(
        self, resource: Resource, namespace: str | None, new: Object, *, dry_run: bool
    ) -> Object:
        """Creates or replaces an object, as the API server would keep it."""
        metadata = new["metadata"]
        key = (resource.group_version, resource.plural, namespace, metadata["name"])
        old = self.objects.get(key)
        if resource.namespaced:
            metadata["namespace"] = namespace
            if ("v1", "namespaces", None, namespace) not in self.objects:
                raise RefusedError(404, "NotFound", f'namespaces "{namespace}" not found')
        self._check(resource, new, old)
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        kept = old["metadata"] if old else {}
        metadata["uid"] = kept.get("uid", str(uuid.uuid4()))
        metadata["creationTimestamp"] = kept.get("creationTimestamp", "2026-01-01T00:00:00Z")
        changed = old is not None and old.get("spec") != new.get("spec")
        metadata["generation"] = kept.get("generation", 1) + changed
        for name, text in new.pop("stringData", {}).items():
            new.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()
        if resource.kind in _DEFAULTS:
            new["spec"] = {**_DEFAULTS[resource.kind], **new["spec"]}
        new.update(_status(new))
        if not dry_run:
            self.objects[key] = new
            self._tell("MODIFIED" if old else "ADDED", resource, namespace, new)
            if resource.kind == "Deployment":
                self._put_replica_set(new, namespace)
        return new

    def delete(self, key: Key, resource: Resource) -> Object:
        gone = self.objects.pop(key)
        self.objects.pop(("apps/v1", "replicasets", key[2], f"{key[3]}-rs"), None)
        self._tell("DELETED", resource, key[2], gone)
        return gone

    def watch(self, watcher: Watcher) -> None:
        if watcher.query.get("sendInitialEvents", [""])[0] == "true":
            for each in self.selected(watcher.resource, watcher.namespace, watcher.query):
                watcher.events.append({"type": "ADDED", "object": each})
            metadata = {
                "resourceVersion": str(self._version),
                "annotations": {"k8s.io/initial-events-end": "true"},
            }
            bookmark = {
                "kind": watcher.resource.kind,
                "apiVersion": watcher.resource.group_version,
                "metadata": metadata,
            }
            watcher.events.append({"type": "BOOKMARK", "object": bookmark})
            watcher.news.set()
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.remove(watcher)

    @property
    def resource_version(self) -> str:
        return str(self._version)

    def _check(self, resource: Resource, new: Object, old: Object | None) -> None:
        plain = {key: value for key, value in copy.deepcopy(new).items() if key != "status"}
        plain["metadata"].pop("managedFields", None)
        name = new["metadata"]["name"]
        faults = schemas.faults(plain, self.version)
        if resource.kind in ("Deployment", "StatefulSet"):
            selector = new["spec"]["selector"]
            labels = new["spec"]["template"]["metadata"].get("labels", {})
            if not selector["matchLabels"].items() <= labels.items():
                faults.append("spec.selector: does not match the template's labels")
            for part in ("selector", "serviceName", "volumeClaimTemplates", "podManagementPolicy"):
                if old and old["spec"].get(part) != new["spec"].get(part):
                    faults.append(f"spec.{part}: field is immutable")
        if resource.kind == "Job" and old and old["spec"]["template"] != new["spec"]["template"]:
            faults.append("spec.template: field is immutable")
        if faults:
            raise RefusedError(422, "Invalid", f'{resource.kind} "{name}" is invalid: {faults}')

    def _put_replica_set(self, deployment: Object, namespace: str | None) -> None:
        """Helm 3 waits for the newest ReplicaSet of a Deployment."""
        template = copy.deepcopy(deployment["spec"]["template"])
        name, uid = deployment["metadata"]["name"], deployment["metadata"]["uid"]
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": uid}
        replica_set = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": f"{name}-rs",
                "labels": template["metadata"]["labels"],
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": {
                "replicas": deployment["spec"].get("replicas", 1),
                "selector": deployment["spec"]["selector"],
                "template": template,
            },
        }
        resource = self.resources["apps/v1", "replicasets"]
        self.put(resource, namespace, replica_set, dry_run=False)

    def _tell(self, event: str, resource: Resource, namespace: str | None, it: Object) -> None:
        for watcher in self._watchers:
            if (
                watcher.resource == resource
                and watcher.namespace in (None, namespace)
                and _matches(it, watcher.query)
            ):
                watcher.events.append({"type": event, "object": copy.deepcopy(it)})
                watcher.news.set()


def _matches(it: Object, query: dict[str, list[str]]) -> bool:
    labels = it["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", [""])[0].split(",")):
        found = re.fullmatch(r"(\S+?)\s*(!=|==?)\s*(\S*)", term)
        if found and (labels.get(found[1]) == found[3]) == (found[2] == "!="):
            return False
        if not found and term not in labels:
            return False
    for term in filter(None, query.get("fieldSelector", [""])[0].split(",")):
        key, _, value = term.partition("=")
        if key == "metadata.name" and it["metadata"]["name"] != value:
            return False
    return True


def _status(it: Object) -> Object:
    """Everything is well at once."""
    spec, generation = it.get("spec", {}), it["metadata"]["generation"]
    count = spec.get("replicas", 1)
    counts = dict.fromkeys(("replicas", "readyReplicas", "availableReplicas"), count)
    observed = {"observedGeneration": generation, **counts, "updatedReplicas": count}
    done = {"type": "Complete", "status": "True"}
    available = [
        {"type": "Available", "status": "True"},
        {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"},
    ]
    phase = "Succeeded" if spec.get("restartPolicy") == "Never" else "Running"
    revisions = {"currentReplicas": count, "currentRevision": "r", "updateRevision": "r"}
    statuses: dict[str, Object] = {
        "Deployment": {**observed, "conditions": available},
        "StatefulSet": {**observed, **revisions},
        "ReplicaSet": observed,
        "Job": {"succeeded": 1, "conditions": [done]},
        "Pod": {"phase": phase, "conditions": [{"type": "Ready", "status": "True"}]},
        "PersistentVolumeClaim": {"phase": "Bound"},
        "Namespace": {"phase": "Active"},
    }
    if it["kind"] == "Service" and spec.get("type") == "LoadBalancer":
        return {"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}}
    return {"status": statuses[it["kind"]]} if it["kind"] in statuses else {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.cluster.requests.append(f"{self.command} {self.path}")
        url = urlparse(self.path)
        path, query = url.path.strip("/"), parse_qs(url.query)
        try:
            found = kube_discovery.answer(
                path, self.cluster.version, self.cluster.resources.values()
            )
            code, answer = (200, found) if found is not None else self._object(path, query, body)
        except RefusedError as refused:
            code, answer = refused.code, self._failure(refused)
        if answer is not None:
            self._send(code, answer)

    def _send(self, code: int, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _failure(self, refused: RefusedError) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "code": refused.code,
            "reason": refused.reason,
            "message": str(refused),
        }

    def _object(self, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        parts = path.split("/")
        start = 2 if parts[0] == "api" else 3
        version, rest = "/".join(parts[1:start]), parts[start:]
        namespace = None
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        resource = self.cluster.resources.get((version, rest[0] if rest else ""))
        if resource is None:
            raise RefusedError(404, "NotFound", f"the server could not find {path}")
        name = rest[1] if len(rest) > 1 else ""
        if rest[2:] == ["log"]:
            return 200, "nothing really runs here"
        if self.command == "GET" and not name and query.get("watch", [""])[0] in ("true", "1"):
            self._watch(resource, namespace, query)
            return 200, None
        with self.cluster.lock:
            return self._stored(resource, namespace, name, query, body)

    def _stored(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        query: dict[str, list[str]],
        body: bytes,
    ) -> tuple[int, Any]:
        cluster = self.cluster
        if self.command == "GET" and not name:
            listed = cluster.selected(resource, namespace, query)
            metadata = {"resourceVersion": cluster.resource_version}
            kind = {"kind": f"{resource.kind}List", "apiVersion": resource.group_version}
            return 200, {**kind, "metadata": metadata, "items": listed}
        new: Object = {}
        if self.command in ("POST", "PUT", "PATCH"):
            binary = body.startswith(kube_protobuf.MAGIC)
            new = kube_protobuf.decode(body) if binary else yaml.safe_load(body)
            if self.command == "POST":
                name = new["metadata"]["name"]
        key = (resource.group_version, resource.plural, namespace, name)
        old = cluster.objects.get(key)
        if self.command == "POST" and old:
            raise RefusedError(409, "AlreadyExists", f'{resource.plural} "{name}" already exists')
        applied = "apply-patch" in self.headers.get("Content-Type", "")
        if self.command != "POST" and old is None and not applied:
            raise RefusedError(404, "NotFound", f'{resource.plural} "{name}" not found')
        if self.command == "GET":
            return 200, old
        dry_run = "dryRun" in query
        if self.command == "DELETE":
            gone = old if dry_run else cluster.delete(key, resource)
            assert gone is not None
            details = {"name": name, "kind": resource.plural, "uid": gone["metadata"]["uid"]}
            status = {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            return 200, {**status, "details": details}
        if self.command == "PATCH" and not applied:
            new = kube_patch.merged(old, new)
        new.setdefault("apiVersion", resource.group_version)
        new.setdefault("kind", resource.kind)
        new["metadata"].setdefault("name", name)
        kept = cluster.put(resource, namespace, new, dry_run=dry_run)
        return (200 if old else 201), kept

    def _watch(
        self, resource: Resource, namespace: str | None, query: dict[str, list[str]]
    ) -> None:
        watcher = Watcher(resource, namespace, query)
        with self.cluster.lock:
            self.cluster.watch(watcher)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        end = time.monotonic() + float(query.get("timeoutSeconds", ["300"])[0])
        try:
            while time.monotonic() < end:
                watcher.news.wait(0.5)
                watcher.news.clear()
                while watcher.events:
                    line = json.dumps(watcher.events.pop(0)).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with self.cluster.lock:
                self.cluster.unwatch(watcher)


@contextmanager
def serving(version: str, port: int = 0) -> Iterator[tuple[Cluster, str]]:
    """The cluster and its URL while the context lasts."""
    cluster = Cluster(version)
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield cluster, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with serving(sys.argv[2] if len(sys.argv) > 2 else "1.37", int(sys.argv[1])) as (_, url):
        print(url, flush=True)
        threading.Event().wait()
