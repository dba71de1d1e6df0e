"""Writes the files of the charts that follow from others: `make charts`.

They are the dashboards, rollout-cluster's copy of the templates that both share, and the schemas of
the values. What both schemas share is said once here, and `run` is the schema of Leeway's own
configuration, so that `helm install` refuses a misspelled key of either. A test proves that all
these files are current.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.helm import dashboards
from leeway.config import Config

HERE = Path(__file__).parent
Schema = dict[str, Any]

# The charts set these themselves, in each container's environment.
_SET_BY_THE_CHARTS = ("security", "telemetry")


def section(description: str, **properties: Schema) -> Schema:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "description": description,
        "additionalProperties": False,
        "properties": properties,
    }


def text(description: str, pattern: str | None = None) -> Schema:
    schema = {"type": "string", "description": description}
    return {**schema, "pattern": pattern} if pattern else schema


def choice(description: str, *options: str) -> Schema:
    return {"type": "string", "description": description, "enum": list(options)}


def whole(description: str, least: int, most: int | None = None) -> Schema:
    schema = {"type": "integer", "description": description, "minimum": least}
    return {**schema, "maximum": most} if most is not None else schema


def flag(description: str) -> Schema:
    return {"type": "boolean", "description": description}


def texts(description: str) -> Schema:
    """An object of strings: labels, annotations, files."""
    return {
        "type": "object",
        "description": description,
        "additionalProperties": {"type": "string"},
    }


def items(description: str, item: Schema) -> Schema:
    return {"type": "array", "description": description, "items": item}


# Parts of Kubernetes' own API: the API server checks them, strictly.
_ANY_OBJECT: Schema = {"type": "object"}
_SIZE = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti)?$"
_NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
_PORT = 65535

_RESOURCES = section(
    "CPU and memory of a pod; GPUs are counted apart.",
    requests=section("What is kept free for it.", cpu=text("Cores."), memory=text("Bytes.", _SIZE)),
    limits=section("What it may use.", cpu=text("Cores."), memory=text("Bytes.", _SIZE)),
)
_PEERS = items("NetworkPolicyPeer.", _ANY_OBJECT)


def scheduling() -> dict[str, Schema]:
    return {
        "resources": _RESOURCES,
        "priorityClassName": text("An existing PriorityClass.", _NAME),
        "nodeSelector": texts("Labels of the machines it may run on."),
        "tolerations": items("Taints that it bears.", _ANY_OBJECT),
        "affinity": {"type": "object", "description": "As in a pod."},
    }


def priority_classes(*components: str) -> Schema:
    value = whole("Pods of a higher one may take the place of others.", -1_000_000, 1_000_000)
    return section(
        "PriorityClasses of the release's own; takes rights on the whole cluster.",
        enabled=flag("Make them, and use them where no priorityClassName is given."),
        **dict.fromkeys(components, value),
    )


def accelerators() -> dict[str, Schema]:
    return {
        "gpus": whole("GPUs of a pod.", 0),
        "gpuResource": text("The resource's name, e.g. nvidia.com/gpu or amd.com/gpu."),
        "sharedMemory": text("Size of /dev/shm.", _SIZE),
        "startSeconds": whole("How long it may take until it is ready.", 30),
    }


def storage(description: str, **more: Schema) -> Schema:
    return section(
        description,
        size=text("Size of the volume.", _SIZE),
        className=text("Storage class; by default the cluster's.", _NAME),
        **more,
    )


def images(*names: str) -> Schema:
    image = section(
        "One image.",
        repository=text("Without registry and tag."),
        tag=text("By default the chart's appVersion."),
        digest=text("sha256:...; takes the place of the tag.", r"^(sha256:[0-9a-f]{64})?$"),
    )
    return section(
        "Container images.",
        registry=text("Stands before every repository: a mirror."),
        pullPolicy=choice("As in a container.", "Always", "IfNotPresent", "Never"),
        pullSecrets=items(
            "Secrets of the registry.", section("A Secret.", name=text("Name.", _NAME))
        ),
        **dict.fromkeys(names, image),
    )


def run() -> tuple[Schema, Schema]:
    """The schema of `run`, and the definitions that it needs."""
    schema = Config.model_json_schema(ref_template="#/definitions/{model}")
    definitions = schema.pop("$defs")
    for name in _SET_BY_THE_CHARTS:
        del schema["properties"][name]
    for definition in definitions.values():
        fields = definition.get("properties", {})
        for name in [name for name, field in fields.items() if _secret(field)]:
            del fields[name]
    schema.pop("title", None)
    schema["description"] = "The run's configuration; `leeway config show` prints it."
    return schema, definitions


def _secret(field: Schema) -> bool:
    """A secret has no place in a ConfigMap; files hold it."""
    return any(each.get("writeOnly") for each in [field, *field.get("anyOf", [])])


def shared(*image_names: str) -> dict[str, Schema]:
    return {
        "files": texts("Small files by name, mounted in /leeway/files."),
        "model": section(
            "The base model.",
            claim=text("An existing volume claim with it, mounted at /leeway/model.", _NAME),
        ),
        "images": images(*image_names),
        "telemetry": section(
            "Logs and traces.",
            logLevel=choice("Lines below are left out.", "debug", "info", "warning", "error"),
            traces=section(
                "OpenTelemetry traces of tasks, from lease to commit.",
                endpoint=text("OTLP over HTTP, e.g. http://otel-collector:4318/v1/traces."),
                port=whole("The endpoint's port, for the network policy.", 1, _PORT),
                ratio={
                    "type": "number",
                    "description": "The part of the tasks that is traced; the same in both charts.",
                    "minimum": 0,
                    "maximum": 1,
                },
            ),
        ),
        "global": {"type": "object", "description": "Helm's own; not used."},
    }


_POD_MONITOR = section(
    "For the Prometheus operator.",
    enabled=flag("Make a PodMonitor."),
    interval=text("Between two scrapes.", r"^[0-9]+(ms|s|m)$"),
)
_AUTHENTICATION = choice("How clients prove who they are.", "mtls", "tokens")


def trainer_cluster() -> dict[str, Schema]:
    secret = text("Name of a Secret.", _NAME)
    return {
        **shared("queue", "trainer", "redis", "redisExporter"),
        "priorityClasses": priority_classes("queue", "redis", "trainer"),
        "endpoint": section(
            "Where the rollout cluster dials in.",
            type=choice("Of the Service.", "LoadBalancer", "NodePort", "ClusterIP"),
            annotations=texts("Of the Service."),
            loadBalancerSourceRanges=items("Who may come in.", text("CIDR.")),
            nodePorts=section(
                "With NodePort; by default any.",
                queue=whole("Port.", 1, _PORT),
                weights=whole("Port.", 1, _PORT),
            ),
            gateway=section(
                "Gateway API, TLS passed through.",
                enabled=flag("Make two TLSRoutes."),
                parent=section(
                    "An existing Gateway.",
                    name=text("Name.", _NAME),
                    namespace=text("Namespace.", _NAME),
                    sectionName=text("Listener.", _NAME),
                ),
                hosts=section("Host names.", queue=text("Host."), weights=text("Host.")),
            ),
        ),
        "security": section(
            "Who may call what, and how it is proved.",
            authentication=_AUTHENTICATION,
            certificates=choice("Who signs.", "job", "existing", "cert-manager"),
            issuer=section(
                "cert-manager's.",
                name=text("Name.", _NAME),
                kind=choice("Kind.", "Issuer", "ClusterIssuer"),
            ),
            serverName=text(
                "What the servers' certificates say.", r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
            ),
            secrets=section(
                "With certificates: existing.",
                **dict.fromkeys(("queue", "trainer", "operator", "redis", "tokens"), secret),
            ),
        ),
        "queue": section("The queue service.", replicas=whole("Pods.", 1), **scheduling()),
        "redis": section(
            "Where the queue keeps everything.",
            external=section(
                "A Redis of your own, instead.",
                url=text("redis:// or rediss://, without the password.", r"^(rediss?://[^@]+)?$"),
                secret=text("A Secret with password and ca.crt.", _NAME),
            ),
            fsync=choice("When the append-only file reaches the disk.", "everysec", "always"),
            maxMemory=text(
                "Below the memory limit; the queue holds back before.", r"^[0-9]+(mb|gb)$"
            ),
            storage=storage("The append-only file."),
            exporter=section(
                "Redis' own metrics for Prometheus.",
                enabled=flag("Run redis_exporter beside it; its Secret needs exporter.json."),
                resources=_RESOURCES,
            ),
            **scheduling(),
        ),
        "trainer": section(
            "The trainer.",
            pods=whole("Machines.", 1),
            minPods=whole(
                "With so many training goes on when others are lost, as far as run.trainer.layout "
                "allows; 0: it waits for all.",
                0,
            ),
            processes=whole("Processes of a pod, most often one a GPU.", 1),
            leaderWorkerSet=flag("A LeaderWorkerSet instead of a StatefulSet."),
            storage=storage(
                "Checkpoints, metrics and sampled trajectories.",
                accessMode=choice("Of the volume.", "ReadWriteOnce", "ReadWriteMany"),
            ),
            **accelerators(),
            **scheduling(),
        ),
        "monitoring": section(
            "For the Prometheus operator and Grafana.",
            labels=texts("Of the objects below."),
            podMonitor=_POD_MONITOR,
            rules=section("Alerts.", enabled=flag("Make a PrometheusRule.")),
            dashboards=section("Dashboards.", enabled=flag("Make a ConfigMap of them.")),
        ),
        "networkPolicy": section(
            "Who may talk to whom.",
            enabled=flag("Make NetworkPolicies."),
            rolloutFrom={
                **_PEERS,
                "description": "Who may reach the endpoint, beside this release.",
            },
            metricsFrom={**_PEERS, "description": "Who may read /metrics."},
            internet=flag("The trainer may fetch models and data over HTTPS."),
        ),
    }


def rollout_cluster() -> dict[str, Schema]:
    address = r"^([^:/]+:[0-9]{1,5})?$"
    return {
        **shared("rollout", "sandbox"),
        "priorityClasses": priority_classes("rollout", "sandbox"),
        "trainerCluster": section(
            "The trainer cluster's endpoint.",
            queue=text("host:port of the queue.", address),
            weights=text("host:port of the weight broadcast.", address),
        ),
        "security": section(
            "How a node proves that it may come.",
            authentication=_AUTHENTICATION,
            serverName=text("What the servers' certificates say; by default the host dialled."),
            secret=text("Name of the Secret.", _NAME),
        ),
        "nodes": section(
            "Rollout nodes: one pod each.",
            replicas=whole("Nodes, unless autoscaling is on.", 0),
            relay=flag("Nodes serve weights to each other; needs authentication: mtls."),
            drainSeconds=whole("To give back what is half done.", 1),
            **accelerators(),
            **scheduling(),
        ),
        "sandbox": section(
            "Reward functions and environments in pods of their own.",
            enabled=flag("Make them; nodes then run none of it themselves."),
            secret=text("Name of the Secret with their certificate.", _NAME),
            replicas=whole("Pods, unless their autoscaling is on.", 1),
            autoscaling=section(
                "HorizontalPodAutoscaler on their CPU.",
                enabled=flag("Make it."),
                minReplicas=whole("Fewest pods.", 1),
                maxReplicas=whole("Most pods.", 1),
                cpu=whole("Percent of the requested CPU that is aimed at.", 1, 100),
            ),
            runtimeClassName=text("An existing RuntimeClass, e.g. gvisor.", _NAME),
            startSeconds=whole("How long it may take until it is ready.", 300),
            drainSeconds=whole("For calls and episodes to end.", 1),
            egress=items("NetworkPolicyEgressRule: what they may reach beside DNS.", _ANY_OBJECT),
            **scheduling(),
        ),
        "gateway": section(
            "The HTTP gateway, for agents that run elsewhere in this cluster.",
            enabled=flag("Make a Service for it."),
            secret=text("A Secret with the token under the key token.", _NAME),
            **{"from": {**_PEERS, "description": "Who may reach it."}},
        ),
        "autoscaling": section(
            "As many nodes as the queue says the run wants.",
            minReplicas=whole("Fewest nodes.", 1),
            maxReplicas=whole("Most nodes.", 1),
            hpa=section(
                "HorizontalPodAutoscaler on an external metric.",
                enabled=flag("Make it."),
                metric=text("Name of the external metric."),
                labels=texts("Of the metric."),
            ),
            keda=section(
                "KEDA.",
                enabled=flag("Make a ScaledObject."),
                prometheus=text("URL of the Prometheus that scrapes the queue."),
                query=text("PromQL."),
            ),
        ),
        "monitoring": section(
            "For the Prometheus operator.",
            labels=texts("Of the object below."),
            podMonitor=_POD_MONITOR,
        ),
        "networkPolicy": section(
            "Who may talk to whom.",
            enabled=flag("Make NetworkPolicies."),
            trainerCluster={**_PEERS, "description": "Where the endpoint is."},
            metricsFrom={**_PEERS, "description": "Who may read /metrics."},
            internet=flag("Nodes may fetch models over HTTPS, and agents call tools."),
        ),
    }


def schema(properties: dict[str, Schema]) -> str:
    configuration, definitions = run()
    whole_schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **section("Values of the chart.", run=configuration, **properties),
        "required": ["run"],
        "definitions": definitions,
    }
    return json.dumps(whole_schema, indent=2) + "\n"


def current() -> dict[Path, str]:
    """Every file as it should be."""
    templates = "templates/_leeway.tpl"
    folder = HERE / "trainer-cluster/dashboards"
    return {
        **{folder / f"{name}.json": dashboards.dashboard(name) for name in dashboards.DASHBOARDS},
        HERE / "trainer-cluster/values.schema.json": schema(trainer_cluster()),
        HERE / "rollout-cluster/values.schema.json": schema(rollout_cluster()),
        HERE / "rollout-cluster" / templates: (HERE / "trainer-cluster" / templates).read_text(),
    }


if __name__ == "__main__":
    for path, content in current().items():
        path.write_text(content)
