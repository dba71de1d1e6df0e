"""Sandboxes in the rollout chart: who reaches them, what they reach, and what they hold."""

from __future__ import annotations

import pytest

from tests.deploy.charts import EXAMPLES, NAMESPACE, environment, of_kind, render, workloads

WITH_SANDBOX = [e for e in EXAMPLES if e != "laptop"]


@pytest.mark.parametrize("example", WITH_SANDBOX)
def test_only_nodes_reach_sandboxes_and_sandboxes_reach_nobody(example: str) -> None:
    manifests = render(example, "rollout")
    (policy,) = [
        m for m in of_kind(manifests, "NetworkPolicy") if m["metadata"]["name"].endswith("-sandbox")
    ]
    (rule,) = [r for r in policy["spec"]["ingress"] if r["ports"][0]["port"] == "sandbox"]
    callers = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]
    }
    # The check of `helm test` comes as a node does.
    assert callers == {"rollout", "check"}
    (dns,) = policy["spec"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    more = render(example, "rollout", sets=('sandbox.egress=[{"ports":[{"port":443}]}]',))
    (open_policy,) = [
        m for m in of_kind(more, "NetworkPolicy") if m["metadata"]["name"].endswith("-sandbox")
    ]
    assert open_policy["spec"]["egress"] == [dns, {"ports": [{"port": 443}]}]


@pytest.mark.parametrize("example", WITH_SANDBOX)
def test_a_sandbox_holds_nothing_that_leases_or_trains(example: str) -> None:
    """Its certificate gives no role; of the keys of tokens it has the one that nodes show it."""
    (workload,) = [w for w in workloads(render(example, "rollout")) if w.name.endswith("-sandbox")]
    (tls,) = [v for v in workload.spec["volumes"] if v["name"] == "tls"]
    taken = {
        (part["secret"]["name"], item["key"])
        for part in tls["projected"]["sources"]
        for item in part["secret"]["items"]
    }
    tokens = {("leeway-rollout-token", "sandbox-client")}
    proof = {(name, key) for name, key in taken if name.endswith(("leeway-sandbox", "sandbox-tls"))}
    assert {key for _, key in proof} == {"tls.crt", "tls.key", "ca.crt"}
    assert taken - proof == (tokens if example == "air-gapped" else set())
    assert not [v for v in workload.spec["volumes"] if "secret" in v]
    names = {variable["name"] for variable in workload.containers[0]["env"]}
    assert not names & {"LEEWAY__QUEUE__ADDRESS", "LEEWAY__SECURITY__TOKEN_FILE"}


def test_nodes_call_the_sandboxes_that_the_service_names() -> None:
    manifests = render("two-clouds", "rollout")
    (node,) = [w for w in workloads(manifests) if w.name == "Deployment/rollout-rollout"]
    (sandbox,) = [w for w in workloads(manifests) if w.name.endswith("-sandbox")]
    assert sandbox.spec["runtimeClassName"] == "gvisor"
    address = environment(node.containers[0])["LEEWAY__ROLLOUT__SANDBOX__ADDRESS"]
    (service,) = [
        s for s in of_kind(manifests, "Service") if s["metadata"]["name"] == address.split(".")[0]
    ]
    (port,) = service["spec"]["ports"]
    assert address == f"rollout-sandbox.{NAMESPACE}.svc:{port['port']}"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= sandbox.labels.items()
    without = render("two-clouds", "rollout", sets=("sandbox.enabled=false",))
    assert "sandbox" not in str([w.manifest for w in workloads(without)])
