"""Reads and writes Secrets of one namespace, from inside of a pod: what the authority's job needs.

The pod's service account gives token and authority, where Kubernetes puts them.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from leeway.deploy.credentials import Secret, manifest
from leeway.errors import ConfigError, InfrastructureError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SECONDS = 30.0


class Secrets:
    """The Secrets of a namespace.

    Raises:
        ConfigError: this is not a pod; or the API refuses, with its words.
        InfrastructureError: the API does not answer.
    """

    def __init__(self, namespace: str, server: str, token: str, authority: Path | None) -> None:
        self._namespace = namespace
        self._url = f"{server}/api/v1/namespaces/{namespace}/secrets"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        secure = server.startswith("https:")
        self._context = ssl.create_default_context(cafile=authority) if secure else None

    @classmethod
    def of_this_pod(cls, namespace: str) -> Secrets:
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
        if host is None or port is None:
            raise ConfigError(
                "--apply: not in a pod (KUBERNETES_SERVICE_HOST is not set); leave it out and pipe "
                "the output to `kubectl apply -f -`"
            )
        host = f"[{host}]" if ":" in host else host
        token = (ACCOUNT / "token").read_text().strip()
        return cls(namespace, f"https://{host}:{port}", token, ACCOUNT / "ca.crt")

    def read(self, names: Iterable[str]) -> dict[str, Secret]:
        """Those that are there, by name."""
        found = {name: self._call("GET", f"{self._url}/{name}") for name in names}
        return {
            name: {key: base64.b64decode(value) for key, value in secret["data"].items()}
            for name, secret in found.items()
            if secret is not None
        }

    def write(self, name: str, data: Secret) -> None:
        """Creates it, or puts the new data in its place."""
        secret = manifest(name, self._namespace, data)
        if self._call("PUT", f"{self._url}/{name}", secret) is None:
            self._call("POST", self._url, secret)

    def _call(self, verb: str, url: str, body: object = None) -> Any:
        """The answer; None where nothing is."""
        content = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(url, content, self._headers, method=verb)
        try:
            with urllib.request.urlopen(
                request, timeout=_SECONDS, context=self._context
            ) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND and verb != "POST":
                return None
            raise ConfigError(f"{verb} {url}: {error.code}: {error.read().decode()}") from error
        except OSError as error:
            raise InfrastructureError(f"{verb} {url}: {error}") from error
