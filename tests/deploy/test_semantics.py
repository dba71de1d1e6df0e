"""What no schema sees: names, ports, volumes, selectors, resources, and how tight pods are."""

from __future__ import annotations

import ipaddress
import re

import pytest

from leeway.config import ENV_PREFIX, load
from tests.deploy.charts import (
    EXAMPLES,
    NAMESPACE,
    SIDES,
    Manifest,
    Workload,
    environment,
    of_kind,
    quantity,
    render,
    workloads,
)

CASES = [(example, side) for example in EXAMPLES for side in SIDES]
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def manifests(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return render(*request.param)


def test_names_and_labels_are_legal_and_everything_is_in_the_namespace(
    manifests: tuple[Manifest, ...],
) -> None:
    for manifest in manifests:
        metadata = manifest["metadata"]
        assert NAME.fullmatch(metadata["name"]), metadata["name"]
        if manifest["kind"] == "PriorityClass":
            # There is no namespace for it: its name says whose it is.
            assert metadata["name"].startswith(f"{NAMESPACE}-") and "namespace" not in metadata
        else:
            assert metadata["namespace"] == NAMESPACE, metadata["name"]
        for value in metadata.get("labels", {}).values():
            assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", value), value


def test_nothing_has_rights_on_the_cluster(manifests: tuple[Manifest, ...]) -> None:
    """A PriorityClass gives none; an installer who asks for it needs them (`priorityClasses`)."""
    assert not of_kind(manifests, "ClusterRole", "ClusterRoleBinding")
    for role in of_kind(manifests, "Role"):
        for rule in role["rules"]:
            assert rule["resources"] == ["secrets"]
            assert "resourceNames" in rule or rule["verbs"] == ["create"]


def test_ports_are_legal_and_named_once(manifests: tuple[Manifest, ...]) -> None:
    for workload in workloads(manifests):
        ports = [port for c in workload.containers for port in c.get("ports", [])]
        names = [port["name"] for port in ports]
        assert len(names) == len(set(names)), workload.name
        assert len({port["containerPort"] for port in ports}) == len(ports), workload.name
        for port in ports:
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?", port["name"])
            assert 1 <= port["containerPort"] <= 65535


def test_every_mount_has_its_volume_and_every_volume_is_mounted(
    manifests: tuple[Manifest, ...],
) -> None:
    for workload in workloads(manifests):
        volumes = {volume["name"] for volume in workload.spec.get("volumes", [])}
        claims = workload.manifest["spec"].get("volumeClaimTemplates", [])
        volumes |= {claim["metadata"]["name"] for claim in claims}
        mounts = [m for c in workload.containers for m in c.get("volumeMounts", [])]
        assert {mount["name"] for mount in mounts} == volumes, workload.name
        for container in workload.containers:
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(paths) == len(set(paths)), workload.name


def test_what_pods_mount_is_made_by_the_chart_or_named_by_the_user(
    manifests: tuple[Manifest, ...],
) -> None:
    made = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    job = [n for role in of_kind(manifests, "Role") for n in role["rules"][1]["resourceNames"]]
    certificates = [c["spec"]["secretName"] for c in of_kind(manifests, "Certificate")]
    users = {
        "leeway-rollout",
        "leeway-rollout-token",
        "leeway-server",
        "leeway-tokens",
        "leeway-redis",
        "trainer-rollout-tls",
        "base-models",
        "leeway-gateway",
        "leeway-sandbox",
        "trainer-sandbox-tls",
        "kube-root-ca.crt",
    }
    for workload in workloads(manifests):
        for volume in workload.spec["volumes"]:
            parts = volume.get("projected", {}).get("sources", [])
            secrets = [part["secret"]["name"] for part in parts if "secret" in part]
            if "secret" in volume:
                secrets.append(volume["secret"]["secretName"])
            for name in secrets:
                assert name in {*job, *certificates, *users}, f"{workload.name}: {name}"
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made, workload.name
            if "persistentVolumeClaim" in volume:
                name = volume["persistentVolumeClaim"]["claimName"]
                assert name in users or ("PersistentVolumeClaim", name) in made, workload.name
        assert (
            "ServiceAccount",
            workload.spec["serviceAccountName"],
        ) in made, workload.name


def test_requests_do_not_exceed_limits_and_every_container_has_both(
    manifests: tuple[Manifest, ...],
) -> None:
    for workload in workloads(manifests):
        for container in workload.containers:
            resources = container["resources"]
            for name in ("cpu", "memory"):
                assert quantity(resources["requests"][name]) <= quantity(resources["limits"][name])
            extended = {n: v for n, v in resources["limits"].items() if "/" in n}
            assert extended == {n: v for n, v in resources["requests"].items() if "/" in n}


def test_every_service_finds_pods_with_its_ports(manifests: tuple[Manifest, ...]) -> None:
    for service in of_kind(manifests, "Service"):
        # Controllers number their pods with these.
        numbers = ("apps.kubernetes.io/pod-index", "leaderworkerset.sigs.k8s.io/worker-index")
        selector = {k: v for k, v in service["spec"]["selector"].items() if k not in numbers}
        pods = [w for w in workloads(manifests) if selector.items() <= w.labels.items()]
        assert pods, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            known = {
                key
                for pod in pods
                for container in pod.containers
                for p in container.get("ports", [])
                for key in (p["name"], p["containerPort"])
            }
            # The rendezvous of a single process is there, and unused.
            assert port["targetPort"] in known or port["name"] == "rendezvous"


def test_budgets_policies_and_autoscalers_find_what_they_speak_of(
    manifests: tuple[Manifest, ...],
) -> None:
    found = workloads(manifests)
    for kind, path in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        for each in of_kind(manifests, kind):
            selector = each["spec"][path]["matchLabels"].items()
            assert any(selector <= w.labels.items() for w in found), each["metadata"]["name"]
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        (workload,) = [w for w in found if w.name == f"{target['kind']}/{target['name']}"]
        assert "replicas" not in workload.manifest["spec"]
    for stateful in of_kind(manifests, "StatefulSet"):
        names = [s["metadata"]["name"] for s in of_kind(manifests, "Service")]
        assert stateful["spec"]["serviceName"] in names


def test_every_long_running_workload_has_its_budget_policy_and_probes(
    manifests: tuple[Manifest, ...],
) -> None:
    for workload in workloads(manifests):
        if workload.manifest["kind"] in ("Job", "Pod"):
            continue
        for kind, path in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
            selectors = [m["spec"][path]["matchLabels"] for m in of_kind(manifests, kind)]
            assert any(s.items() <= workload.labels.items() for s in selectors), workload.name
        for container in workload.containers:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert probe in container, f"{workload.name}: {probe}"
            start = container["startupProbe"]
            assert start["failureThreshold"] * start["periodSeconds"] >= 300
        assert workload.spec["topologySpreadConstraints"], workload.name
        for constraint in workload.spec["topologySpreadConstraints"]:
            selector = constraint["labelSelector"]["matchLabels"].items()
            assert selector <= workload.labels.items()


def test_pods_are_locked_down(manifests: tuple[Manifest, ...]) -> None:
    for workload in workloads(manifests):
        spec = workload.spec
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 10000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not [v for v in spec["volumes"] if "hostPath" in v]
        for container in workload.containers:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_no_secret_is_in_an_environment_an_argument_or_a_config_map(
    manifests: tuple[Manifest, ...],
) -> None:
    assert not of_kind(manifests, "Secret")
    for workload in workloads(manifests):
        for container in workload.containers:
            for variable in container.get("env", []):
                assert "secretKeyRef" not in variable.get("valueFrom", {}), variable
                assert not re.search(r"://[^/]*:[^/]*@", variable.get("value", "")), variable
            assert "envFrom" not in container


def test_the_rollout_side_listens_to_nobody_outside() -> None:
    for example in EXAMPLES:
        manifests = render(example, "rollout")
        for service in of_kind(manifests, "Service"):
            assert service["spec"].get("type", "ClusterIP") == "ClusterIP"
        assert not of_kind(manifests, "Ingress", "TLSRoute")
        for policy in of_kind(manifests, "NetworkPolicy"):
            for rule in policy["spec"]["ingress"]:
                ports = {port["port"] for port in rule["ports"]}
                assert ports <= {"metrics", "gateway", "relay", "sandbox"}
                assert all("ipBlock" not in peer for peer in rule["from"])


def test_only_the_queue_reaches_redis() -> None:
    manifests = render("laptop", "trainer")
    (policy,) = [
        m for m in of_kind(manifests, "NetworkPolicy") if m["metadata"]["name"].endswith("-redis")
    ]
    (rule,) = policy["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "queue"
    assert policy["spec"]["egress"] == []


def test_the_exporter_is_read_by_who_reads_metrics_and_by_nobody_else() -> None:
    manifests = render("one-cluster", "trainer")
    (policy,) = [
        m for m in of_kind(manifests, "NetworkPolicy") if m["metadata"]["name"].endswith("-redis")
    ]
    redis, metrics = policy["spec"]["ingress"]
    assert [port["port"] for port in redis["ports"]] == ["redis"]
    assert [port["port"] for port in metrics["ports"]] == ["metrics"]
    assert all("namespaceSelector" in peer for peer in metrics["from"])
    (workload,) = [w for w in workloads(manifests) if w.name.endswith("-redis")]
    (monitor,) = of_kind(manifests, "PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= workload.labels.items()
    ports = [port["name"] for c in workload.containers for port in c["ports"]]
    assert [e["port"] for e in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    assert ports.count("metrics") == 1


def test_where_room_is_short_nodes_go_first_and_the_queue_last() -> None:
    values = {}
    for side in SIDES:
        for example in set(EXAMPLES) - {"one-cluster"}:
            assert not of_kind(render(example, side), "PriorityClass")
        manifests = render("one-cluster", side)
        classes = {m["metadata"]["name"]: m["value"] for m in of_kind(manifests, "PriorityClass")}
        used = {
            w.spec["priorityClassName"]: w
            for w in workloads(manifests)
            if "priorityClassName" in w.spec
        }
        assert used.keys() == classes.keys()
        for name, value in classes.items():
            component = used[name].labels["app.kubernetes.io/component"]
            assert name == f"leeway-{side}-{component}"
            values[component] = value
    assert values["rollout"] < values["trainer"] < values["queue"] <= values["redis"]
    named = render("one-cluster", "rollout", sets=('nodes.priorityClassName="mine"',))
    (deployment,) = [
        m for m in of_kind(named, "Deployment") if m["metadata"]["name"].endswith("-rollout")
    ]
    assert deployment["spec"]["template"]["spec"]["priorityClassName"] == "mine"


def test_network_policies_name_networks_that_exist(manifests: tuple[Manifest, ...]) -> None:
    for policy in of_kind(manifests, "NetworkPolicy"):
        for rule in [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]:
            for peer in [*rule.get("from", []), *rule.get("to", [])]:
                if "ipBlock" in peer:
                    network = ipaddress.ip_network(peer["ipBlock"]["cidr"])
                    for inner in peer["ipBlock"].get("except", []):
                        assert ipaddress.ip_network(inner).subnet_of(network)


def test_nodes_have_the_time_to_drain() -> None:
    for example in EXAMPLES:
        drains = {"rollout": "ROLLOUT__DRAIN_SECONDS", "sandbox": "ROLLOUT__SANDBOX__DRAIN_SECONDS"}
        for workload in workloads(render(example, "rollout")):
            if "Deploy" not in workload.name:
                continue
            component = workload.labels["app.kubernetes.io/component"]
            drain = float(environment(workload.containers[0])[ENV_PREFIX + drains[component]])
            assert drain < workload.spec["terminationGracePeriodSeconds"]


def test_leeway_takes_the_environment_and_the_configuration(
    manifests: tuple[Manifest, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each container's own, through the loader that its process will use."""
    run = [m for m in of_kind(manifests, "ConfigMap") if m["metadata"]["name"].endswith("-run")]
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_text(run[0]["data"]["run.yaml"])
    for workload in workloads(manifests):
        for container in workload.containers:
            if container["name"] in ("redis", "exporter", "credentials"):
                continue
            config = load(path, environ=environment(container))
            security = config.security
            mounts = tuple(m["mountPath"] for m in container["volumeMounts"])
            for file in (security.certificate, security.key, security.authority):
                assert file is None or str(file).startswith(mounts), file
            for folder in (security.token_file, security.accepted_tokens):
                assert folder is None or str(folder).startswith(mounts), folder
            if workload.manifest["kind"] != "Pod":
                assert config.telemetry.metrics_address == "0.0.0.0:9100"
                served = [p["containerPort"] for p in container["ports"]]
                assert 9100 in served


def test_servers_are_secured_wherever_they_listen(manifests: tuple[Manifest, ...]) -> None:
    for workload in workloads(manifests):
        _assert_secured(workload)


def _assert_secured(workload: Workload) -> None:
    for container in workload.containers:
        names = {p["name"] for p in container.get("ports", [])}
        if names & {"queue", "weights", "sandbox"}:
            given = environment(container)
            assert "LEEWAY__SECURITY__CERTIFICATE" in given, workload.name
            assert "LEEWAY__SECURITY__AUTHORITY" in given, workload.name
