"""What all services have: weights on their way, who may call, what is told."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, model_validator

from leeway.section import Section

LOOPBACK_ANY_PORT = "127.0.0.1:0"


class WeightsConfig(Section):
    address: str = LOOPBACK_ANY_PORT
    """host:port of the weight broadcast service."""
    chunk_bytes: PositiveInt = 1 << 20
    anchor_every: PositiveInt = 20
    """Full weights are offered at least every so many versions; deltas in between."""
    kept_versions: PositiveInt = 8
    """A node that lags by no more than so many versions gets a delta; beyond, it is an alarm."""
    relay_address: str | None = None
    """host:port at which a node serves weights to others in its cluster; by default it does not."""
    cluster: str = ""
    """Nodes that give the same name can reach each other's relay_address."""
    relay_fanout: PositiveInt = 4
    """How many nodes one node serves at most."""
    canary_tokens: Annotated[int, Field(ge=2)] = 8
    """Length of the text by which every engine proves that it holds the weights it was given."""
    canary_tolerance: PositiveFloat = 0.5
    """How far a token's log-probability may be from the trainer's, in nats. Where both sides
    compute in bf16 they differ by some tenths; in float32, as on CPUs, by less than 0.001: there
    use 0.01."""


class SecurityConfig(Section):
    """Both ends prove who they are. Off loopback, a server asks for certificates or for tokens.

    `leeway/roles.py` says what each role may call.
    """

    token: SecretStr | None = None
    """A key for both ends: whoever has it may call anything."""
    token_file: Path | None = None
    """A client's key, one a line, the first signs; the file is named after the role, e.g. rollout.
    It is read again when it changes."""
    accepted_tokens: Path | None = None
    """A server's directory of such files: whose tokens it accepts. It then asks for no client
    certificate."""
    certificate: Path | None = None
    key: Path | None = None
    """PEM files: how this process proves who it is."""
    authority: Path | None = None
    """PEM file: who signs the other side's certificates."""
    server_name: str | None = None
    """What a server's certificate must say; by default the host that is dialled."""

    @model_validator(mode="after")
    def _halves_belong_together(self) -> SecurityConfig:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("security.certificate and security.key belong together; give both")
        if self.certificate is not None and self.authority is None:
            raise ValueError(
                "security.certificate needs security.authority, which says whom to trust; for "
                "public authorities give the system's bundle"
            )
        return self

    @property
    def asks_for_tokens(self) -> bool:
        """As a server."""
        return self.token is not None or self.accepted_tokens is not None

    @property
    def asks_for_certificates(self) -> bool:
        """As a server."""
        return self.certificate is not None and self.accepted_tokens is None

    @property
    def secured(self) -> bool:
        return self.asks_for_tokens or self.asks_for_certificates


class TrackerKind(StrEnum):
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"


class TelemetryConfig(Section):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    metrics_address: str | None = None
    """host:port at which this process answers /metrics, /livez and /readyz; by default none."""
    traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP); by default no trace is recorded."""
    traces_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """The part of all tasks that are traced; every process chooses the same ones."""
    trackers: tuple[TrackerKind, ...] = ()
    """Experiment trackers that get the rows of metrics.jsonl as well; each is a package of its own
    and takes its further settings from its own environment variables. See docs/metrics.md."""
    spans: bool = False
    """Record a timeline of each process in the run's directory (spans-<role>.jsonl)."""
