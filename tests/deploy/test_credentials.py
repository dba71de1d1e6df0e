"""The authority's job: makes what is missing, keeps what is there, renews what ends soon."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from cryptography import x509

from leeway.deploy.credentials import (
    CERTIFICATE_DAYS,
    RENEWED_DAYS,
    Parts,
    Secret,
    make,
    names,
)
from leeway.deploy.kubernetes import Secrets
from leeway.errors import ConfigError
from leeway.roles import Role, roles_of
from tests.deploy import kube_api
from tests.deploy.charts import NAMESPACE, of_kind, render

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PARTS = Parts("trainer", ("leeway-trainer-cluster", "queue.example.com"))


def certificate(secret: Secret) -> x509.Certificate:
    return x509.load_pem_x509_certificate(secret["tls.crt"])


def alternatives(secret: Secret) -> x509.SubjectAlternativeName:
    found = certificate(secret).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return found.value


def test_each_certificate_is_the_authoritys_and_names_its_role() -> None:
    made = make(PARTS, {}, NOW)
    assert set(made) == set(names(PARTS))
    authority = certificate(made["trainer-ca"])
    # Of the last there are keys only.
    for component in ("queue", "redis", "sandbox", *(set(Role) - {Role.SANDBOX_CLIENT})):
        secret = made[f"trainer-{component}-tls"]
        certificate(secret).verify_directly_issued_by(authority)
        uris = alternatives(secret).get_values_for_type(x509.UniformResourceIdentifier)
        roles = {role.value for role in roles_of(uris)}
        assert roles == ({component} & set(Role))
    for component in ("queue", "trainer"):
        dns = alternatives(made[f"trainer-{component}-tls"]).get_values_for_type(x509.DNSName)
        assert dns == list(PARTS.server_names)


def test_a_node_cannot_pass_for_a_server() -> None:
    dns = alternatives(make(PARTS, {}, NOW)["trainer-rollout-tls"])
    assert not set(dns.get_values_for_type(x509.DNSName)) & set(PARTS.server_names)


def test_what_is_there_stays() -> None:
    made = make(PARTS, {}, NOW)
    assert make(PARTS, made, NOW + timedelta(days=CERTIFICATE_DAYS - RENEWED_DAYS - 1)) == {}


def test_a_secret_of_an_earlier_release_gets_what_it_lacks() -> None:
    made = make(PARTS, {}, NOW)
    older = {k: v for k, v in made["trainer-redis-tls"].items() if k != "exporter.json"}
    assert make(PARTS, {**made, "trainer-redis-tls": older}, NOW) == {
        "trainer-redis-tls": made["trainer-redis-tls"]
    }
    keys = {k: v for k, v in made["trainer-tokens"].items() if k != "sandbox-client"}
    again = make(PARTS, {**made, "trainer-tokens": keys}, NOW)
    assert set(again) == {"trainer-tokens", "trainer-rollout-token"}
    assert again["trainer-tokens"].items() > keys.items()


def test_certificates_that_end_soon_are_renewed_and_nothing_else() -> None:
    made = make(PARTS, {}, NOW)
    later = NOW + timedelta(days=CERTIFICATE_DAYS - RENEWED_DAYS)
    renewed = make(PARTS, made, later)
    assert set(renewed) == {name for name in made if name.endswith("-tls")}
    assert renewed["trainer-redis-tls"]["password"] == made["trainer-redis-tls"]["password"]
    assert renewed["trainer-queue-tls"]["ca.crt"] == made["trainer-ca"]["tls.crt"]


def test_another_name_of_the_servers_makes_their_certificates_anew() -> None:
    made = make(PARTS, {}, NOW)
    renamed = make(Parts("trainer", ("another",)), made, NOW)
    assert set(renamed) == {"trainer-queue-tls", "trainer-trainer-tls"}


def test_the_rollout_cluster_gets_no_key_but_its_own() -> None:
    made = make(PARTS, {}, NOW)
    assert set(made["trainer-rollout-token"]) == {"rollout", "sandbox-client", "ca.crt"}
    for role in ("rollout", "sandbox-client"):
        assert made["trainer-rollout-token"][role] == made["trainer-tokens"][role]
    assert len(set(made["trainer-tokens"].values())) == len(Role)


@pytest.mark.parametrize("example", ["laptop", "two-clouds"])
def test_the_job_may_touch_exactly_what_it_makes(example: str) -> None:
    manifests = render(example, "trainer")
    (role,) = of_kind(manifests, "Role")
    (job,) = of_kind(manifests, "Job")
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    only = {a.partition("=")[2] for a in arguments if a.startswith("--only=")}
    parts = Parts(
        "trainer",
        ("x",),
        certificates=not only or "certificates" in only,
        redis=not only or "redis" in only,
        tokens=not only or "tokens" in only,
    )
    assert sorted(role["rules"][1]["resourceNames"]) == sorted(names(parts))


def test_the_secrets_reach_kubernetes_and_come_back() -> None:
    with kube_api.serving("1.37") as (cluster, url):
        secrets = Secrets(NAMESPACE, url, "token", None)
        made = make(PARTS, secrets.read(names(PARTS)), NOW)
        for name, data in made.items():
            secrets.write(name, data)
        assert secrets.read(names(PARTS)) == made
        secrets.write("trainer-tokens", {"rollout": b"x"})
        assert secrets.read(["trainer-tokens"]) == {"trainer-tokens": {"rollout": b"x"}}
        assert len(cluster.of_kind("Secret")) == len(made)
        with pytest.raises(ConfigError, match="404"):
            Secrets("nowhere", url, "token", None).write("a", {})


def test_the_command_prints_what_kubectl_takes() -> None:
    command = [sys.executable, "-m", "leeway.cli", "deploy", "credentials"]
    options = ["--release=trainer", f"--namespace={NAMESPACE}", "--server-name=a", "--only=tokens"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    printed = list(yaml.safe_load_all(done.stdout))
    assert {each["metadata"]["name"] for each in printed} == {
        "trainer-tokens",
        "trainer-rollout-token",
    }
    outside = subprocess.run([*command, *options, "--apply"], capture_output=True, text=True)
    assert outside.returncode == 2 and "not in a pod" in outside.stderr
