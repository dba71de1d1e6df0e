"""What Kubernetes would say of a manifest: strict schemas of its kinds, and of some operators'.

Unknown fields are faults. Of custom resources only the fields that the charts use are known here,
as their definitions have them; a pod inside of one is checked as a pod.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema
from referencing import Registry, Resource

VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
CUSTOM_RESOURCES = {
    "monitoring.coreos.com/v1": "PodMonitor PrometheusRule",
    "keda.sh/v1alpha1": "ScaledObject",
    "cert-manager.io/v1": "Certificate",
    "gateway.networking.k8s.io/v1": "TLSRoute",
    "leaderworkerset.x-k8s.io/v1": "LeaderWorkerSet",
}

_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
_DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}
_HOST = {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
_BACKEND = {"name": _TEXT, "port": _COUNT}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required.split(),
        "additionalProperties": False,
        "properties": properties,
    }


def _array(item: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": item}


_RULE = _object(
    "alert expr",
    alert=_TEXT,
    expr=_TEXT,
    **{"for": _DURATION, "labels": _LABELS, "annotations": _LABELS},
)
_SCALING = _object(
    "policies",
    stabilizationWindowSeconds=_COUNT,
    policies=_array(
        _object(
            "type value periodSeconds",
            type={"enum": ["Percent", "Pods"]},
            value=_COUNT,
            periodSeconds=_COUNT,
        )
    ),
)
_SPECS = {
    "PodMonitor": _object(
        "selector podMetricsEndpoints",
        selector=_object("matchLabels", matchLabels=_LABELS),
        podTargetLabels=_array(_TEXT),
        podMetricsEndpoints=_array(_object("port", port=_TEXT, interval=_DURATION)),
    ),
    "PrometheusRule": _object(
        "groups", groups=_array(_object("name rules", name=_TEXT, rules=_array(_RULE)))
    ),
    "ScaledObject": _object(
        "scaleTargetRef triggers",
        scaleTargetRef=_object("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
        minReplicaCount=_COUNT,
        maxReplicaCount=_COUNT,
        pollingInterval=_COUNT,
        advanced=_object(
            "horizontalPodAutoscalerConfig",
            horizontalPodAutoscalerConfig=_object(
                "behavior",
                behavior=_object("scaleUp scaleDown", scaleUp=_SCALING, scaleDown=_SCALING),
            ),
        ),
        triggers=_array(
            _object(
                "type metadata",
                type={"const": "prometheus"},
                metricType={"enum": ["AverageValue", "Value"]},
                metadata=_object(
                    "serverAddress query threshold",
                    serverAddress=_TEXT,
                    query=_TEXT,
                    threshold=_TEXT,
                ),
            )
        ),
    ),
    "Certificate": _object(
        "secretName issuerRef",
        secretName=_TEXT,
        duration=_DURATION,
        renewBefore=_DURATION,
        privateKey=_object(
            "",
            algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
            size=_COUNT,
            rotationPolicy={"enum": ["Never", "Always"]},
        ),
        usages=_array({"enum": ["digital signature", "server auth", "client auth"]}),
        dnsNames=_array(_TEXT),
        uris=_array(_TEXT),
        issuerRef=_object("name", name=_TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}),
    ),
    "TLSRoute": _object(
        "hostnames rules",
        parentRefs=_array(_object("name", name=_TEXT, namespace=_TEXT, sectionName=_TEXT)),
        hostnames=_array(_HOST),
        rules=_array(
            _object(
                "backendRefs", backendRefs=_array(_object("name port", name=_TEXT, port=_COUNT))
            )
        ),
    ),
    "LeaderWorkerSet": _object(
        "leaderWorkerTemplate",
        replicas=_COUNT,
        leaderWorkerTemplate=_object(
            "workerTemplate",
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart"]},
            workerTemplate={"type": "object"},
        ),
    ),
}


def faults(manifest: dict[str, Any], version: str) -> list[str]:
    """What is wrong with a manifest in that version of Kubernetes, one text a fault."""
    kind, api = manifest["kind"], manifest["apiVersion"]
    if kind in CUSTOM_RESOURCES.get(api, "").split():
        found = _faults(jsonschema.Draft202012Validator(_SPECS[kind]), manifest["spec"])
        if kind == "LeaderWorkerSet":
            template = manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            found += faults(_as_pod(template), version)
        return found
    validator = _validator(kind, api, version)
    if validator is None:
        return [f"no schema for {api} {kind} in {version}"]
    return _faults(validator, manifest)


def _faults(validator: Any, value: Any) -> list[str]:
    return [
        f"{'.'.join(map(str, error.path))}: {error.message[:200]}"
        for error in validator.iter_errors(value)
    ]


def _as_pod(template: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "pod", **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@cache
def _validator(kind: str, api: str, version: str) -> Any:
    group = re.sub(r"^([^./]*)(?:[.][^/]*)?/", r"\1-", api)
    name = f"{kind.lower()}-{group}.json"
    folder = _folder(version)
    if not (folder / name).is_file():
        return None
    schema = json.loads((folder / name).read_text())
    return jsonschema.Draft202012Validator(schema, registry=_registry(version))


@cache
def _registry(version: str) -> Any:
    definitions = json.loads((_folder(version) / "_definitions.json").read_text())
    return Resource.from_contents(definitions) @ Registry()


def _folder(version: str) -> Any:
    folder = files("kubernetes_validate") / "kubernetes-json-schema"
    return folder / f"v{version}.0-local-strict"
