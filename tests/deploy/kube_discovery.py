"""What an API server says of itself: versions, kinds, and what it can do with them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tests.deploy import schemas

Object = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    group_version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def path(self) -> str:
        root = "api" if "/" not in self.group_version else "apis"
        return f"{root}/{self.group_version}"


_NAMESPACED = {
    "v1": "Pod Service ConfigMap Secret ServiceAccount PersistentVolumeClaim Event",
    "apps/v1": "Deployment StatefulSet DaemonSet ReplicaSet",
    "batch/v1": "Job CronJob",
    "autoscaling/v2": "HorizontalPodAutoscaler",
    "policy/v1": "PodDisruptionBudget",
    "networking.k8s.io/v1": "Ingress NetworkPolicy",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding",
}
_PLURALS = {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"}


def resources() -> list[Resource]:
    found = [
        Resource("v1", "namespaces", "Namespace", namespaced=False),
        Resource("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", namespaced=False),
    ]
    for version, kinds in [*_NAMESPACED.items(), *schemas.CUSTOM_RESOURCES.items()]:
        found += [
            Resource(version, _PLURALS.get(kind, kind.lower() + "s"), kind)
            for kind in kinds.split()
        ]
    return found


def answer(path: str, version: str, known: Collection[Resource]) -> Any:
    """What the API server says of itself at a path; None if it is not such a path."""
    versions = sorted({r.group_version for r in known})
    if path in ("healthz", "readyz", "livez"):
        return "ok"
    if path == "version":
        major, minor = version.split(".")
        git = f"v{major}.{minor}.0"
        return {"major": major, "minor": minor, "gitVersion": git, "platform": "linux/amd64"}
    if path == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "apis":
        groups = [
            {
                "name": version.split("/")[0],
                "versions": [{"groupVersion": version, "version": version.split("/")[1]}],
            }
            for version in versions
            if "/" in version
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "openapi/v3":
        paths = {("apis/" if "/" in v else "api/") + v for v in versions}
        urls = {p: {"serverRelativeURL": f"/openapi/v3/{p}?hash=1"} for p in paths}
        return {"paths": urls}
    if path.startswith("openapi/v3/"):
        return _openapi(path.removeprefix("openapi/v3/"), version, known)
    for each in versions:
        if path == ("apis/" if "/" in each else "api/") + each:
            return _resource_list(each, known)
    return None


def _openapi(path: str, version: str, known: Collection[Resource]) -> Object:
    """Tells the clients that server-side dry runs and field validation are there."""
    names = ("dryRun", "fieldManager", "fieldValidation")
    parameters = [{"name": n, "in": "query", "schema": {"type": "string"}} for n in names]
    paths = {}
    for resource in known:
        if resource.path == path:
            group, _, of_group = resource.group_version.rpartition("/")
            kind = {"group": group, "version": of_group, "kind": resource.kind}
            patch = {
                "parameters": parameters,
                "responses": {"200": {"description": "OK"}},
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": kind,
            }
            where = "namespaces/{namespace}/" if resource.namespaced else ""
            paths[f"/{path}/{where}{resource.plural}/{{name}}"] = {"patch": patch}
    info = {"title": "Kubernetes", "version": version}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}


def _resource_list(version: str, known: Collection[Resource]) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    listed = [
        {
            "name": r.plural,
            "singularName": r.kind.lower(),
            "namespaced": r.namespaced,
            "kind": r.kind,
            "verbs": verbs,
        }
        for r in known
        if r.group_version == version
    ]
    kind = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version}
    return {**kind, "resources": listed}
