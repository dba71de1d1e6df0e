"""The credentials of a deployment, as the Secrets that the charts mount.

An own authority signs a certificate for each component; a certificate names its role in a URI (see
leeway/roles.py). Beside them are the keys of tokens and the password of Redis. Everything that is
there already stays, except certificates that end soon.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from leeway.errors import ConfigError
from leeway.roles import NODE_NAME, SANDBOX_NAME, Role

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 365
RENEWED_DAYS = 60
"""A certificate that ends sooner is made anew."""
# Clocks differ, and a certificate is used the moment it is made.
_EARLIER = timedelta(hours=1)

REDIS_BESIDE = "rediss://localhost:6379"
"""Where a container beside Redis finds it."""

_COMPONENTS = ("queue", "trainer", "rollout", "sandbox", "operator", "producer")

Secret = Mapping[str, bytes]
"""The data of a Kubernetes Secret."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Which credentials are made, and for whom.

    Attributes:
        release: The trainer cluster's release; stands before the Secrets' names.
        server_names: What the certificates of queue and trainer say.
    """

    release: str
    server_names: tuple[str, ...]
    certificates: bool = True
    redis: bool = True
    tokens: bool = True


def names(parts: Parts) -> list[str]:
    """All that `make` may make or read."""
    suffixes = ["tokens", "rollout-token"] if parts.tokens else []
    suffixes += ["redis-tls"] if parts.redis else []
    suffixes += ["ca"] if parts.redis or parts.certificates else []
    suffixes += [f"{component}-tls" for component in _COMPONENTS if parts.certificates]
    return [f"{parts.release}-{suffix}" for suffix in suffixes]


def make(parts: Parts, existing: Mapping[str, Secret], now: datetime) -> dict[str, Secret]:
    """The Secrets by name: those that must be written, the others left out.

    Raises:
        ConfigError: an existing Secret cannot be read.
    """
    made: dict[str, Secret] = {}

    def name(suffix: str) -> str:
        return f"{parts.release}-{suffix}"

    authority = existing.get(name("ca")) or _authority(parts.release, now)
    if parts.certificates or parts.redis:
        if name("ca") not in existing:
            made[name("ca")] = authority
        wanted: dict[str, tuple[tuple[str, ...], tuple[Role, ...]]] = {}
        if parts.certificates:
            wanted["queue-tls"] = parts.server_names, ()
            wanted["trainer-tls"] = parts.server_names, (Role.TRAINER,)
            wanted["rollout-tls"] = (NODE_NAME,), (Role.ROLLOUT,)
            wanted["sandbox-tls"] = (SANDBOX_NAME,), ()
            wanted["operator-tls"] = ("leeway-operator",), (Role.OPERATOR,)
            wanted["producer-tls"] = ("leeway-producer",), (Role.PRODUCER,)
        if parts.redis:
            wanted["redis-tls"] = (name("redis"), "localhost"), ()
        for suffix, (names, roles) in wanted.items():
            current = existing.get(name(suffix), {})
            if not _good(current, authority, names, now):
                made[name(suffix)] = {**current, **_certificate(authority, names, roles, now)}
        if parts.redis:
            redis = made.get(name("redis-tls"), existing.get(name("redis-tls"), {}))
            if "password" not in redis:
                password = secrets.token_urlsafe(32).encode()
                auth = b"requirepass " + password + b"\n"
                redis = {**redis, "password": password, "auth.conf": auth}
                made[name("redis-tls")] = redis
            if "exporter.json" not in redis:
                # As redis_exporter reads it: passwords by address.
                by_address = {REDIS_BESIDE: redis["password"].decode()}
                exporter = json.dumps(by_address).encode()
                made[name("redis-tls")] = {**redis, "exporter.json": exporter}
    if parts.tokens:
        tokens = existing.get(name("tokens"), {})
        if lacking := [role.value for role in Role if role.value not in tokens]:
            keys = {role: secrets.token_urlsafe(32).encode() for role in lacking}
            tokens = made[name("tokens")] = {**tokens, **keys}
        # What the rollout cluster needs, and no more.
        ours = {role.value: tokens[role.value] for role in (Role.ROLLOUT, Role.SANDBOX_CLIENT)}
        if parts.certificates:
            ours["ca.crt"] = authority["tls.crt"]
        if existing.get(name("rollout-token")) != ours:
            made[name("rollout-token")] = ours
    return made


def manifest(name: str, namespace: str, data: Secret) -> dict[str, object]:
    """The Secret as Kubernetes takes it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/name": "leeway"},
        },
        "type": "Opaque",
        "data": {key: base64.b64encode(value).decode() for key, value in sorted(data.items())},
    }


def _authority(release: str, now: datetime) -> Secret:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{release} authority")])
    certificate = (
        _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    return {"tls.crt": certificate.public_bytes(Encoding.PEM), "tls.key": _private(key)}


def _certificate(
    authority: Secret, names: Iterable[str], roles: Iterable[Role], now: datetime
) -> Secret:
    issuer, issuer_key = _load(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    names = list(names)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
    alternatives += [x509.UniformResourceIdentifier(f"spiffe://leeway/{role}") for role in roles]
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(subject, issuer.subject, key.public_key(), now, CERTIFICATE_DAYS)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .sign(issuer_key, SHA256())
    )
    return {
        "tls.crt": certificate.public_bytes(Encoding.PEM),
        "tls.key": _private(key),
        "ca.crt": authority["tls.crt"],
    }


def _good(current: Secret, authority: Secret, names: Iterable[str], now: datetime) -> bool:
    """Whether a certificate is of this authority, for these names, and lasts."""
    if current.get("ca.crt") != authority["tls.crt"] or "tls.key" not in current:
        return False
    certificate = x509.load_pem_x509_certificate(current["tls.crt"])
    given = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    lasts = certificate.not_valid_after_utc - now > timedelta(days=RENEWED_DAYS)
    return lasts and set(names) == set(given.get_values_for_type(x509.DNSName))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _load(authority: Secret) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = load_pem_private_key(authority["tls.key"], None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("the authority's key is not one that this command made")
    return x509.load_pem_x509_certificate(authority["tls.crt"]), key


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def utc_now() -> datetime:
    return datetime.now(UTC)
