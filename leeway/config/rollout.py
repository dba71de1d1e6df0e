"""The nodes: their engine, their gateway, how much they generate at once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, SecretStr, model_validator

from leeway.config.services import LOOPBACK_ANY_PORT
from leeway.section import Limits, Section


class UpdateMode(StrEnum):
    """What happens to generations in flight when new weights arrive."""

    IN_PLACE = "in_place"
    RECOMPUTE = "recompute"
    DRAIN = "drain"


class GatewayConfig(Section):
    """The HTTP server that agents use; it runs on nodes whose tasks have an agent."""

    address: str = LOOPBACK_ANY_PORT
    """host:port it binds; off loopback only with a token."""
    token: SecretStr | None = None
    """What programs that run elsewhere open sessions with. A session's own key is made for it."""
    token_file: Path | None = None
    """Holds the token instead."""
    max_requests: PositiveInt = 1024
    """So many answers may be under way at once; beyond, it answers 429."""


class SandboxConfig(Section):
    """Where reward functions and environments run: on the node, or apart from it, at `leeway
    sandbox`."""

    address: str | None = None
    """host:port of the sandboxes, which the name may stand for several of; by default they run in
    processes of the node. A sandbox binds it."""
    token_file: Path | None = None
    """A node's key for them, in a file named sandbox-client; by default security.token_file."""
    drain_seconds: PositiveFloat = 30.0
    """After SIGTERM a sandbox gives calls and episodes so long to end."""


class EngineConfig(Section):
    """What generates. See the table of engines in docs/engine.md."""

    kind: Literal["torch", "sglang", "vllm"] = "torch"
    """`torch` is embedded, for CPUs; `sglang` and `vllm` are servers beside the node."""
    url: str | None = None
    """A server that runs already, used by this node alone."""
    command: tuple[str, ...] | None = None
    """A command line that starts one; {model} and {port} are filled in."""
    start_seconds: PositiveFloat = 900.0
    """How long a server may take to load its model."""
    deterministic: bool = False
    """Of `torch`: what a request samples is the same to the last bit whoever shares the engine with
    it, so that synchronous runs repeat exactly; what prompts begin with alike is computed for each.
    A server has an option of its own."""

    @model_validator(mode="after")
    def _own_determinism(self) -> EngineConfig:
        if self.deterministic and self.kind != "torch":
            option = {
                "sglang": "--enable-deterministic-inference in engine.command",
                "vllm": "VLLM_BATCH_INVARIANT=1 in the node's environment",
            }[self.kind]
            raise ValueError(f"engine.deterministic = true: {self.kind} takes {option} instead")
        return self

    @model_validator(mode="after")
    def _one_server(self) -> EngineConfig:
        servers = (self.url is not None) + (self.command is not None)
        if servers != (self.kind != "torch"):
            raise ValueError(
                f"engine.kind = {self.kind}: sglang and vllm need one of engine.url and "
                "engine.command; torch needs none"
            )
        return self


class AutoConcurrencyConfig(Limits):
    """Limits and bounds of the controller that `rollout.concurrency: auto` turns on."""

    lowest: PositiveInt = 8
    """Where it begins."""
    highest: PositiveInt = 256
    increase: PositiveInt = 8
    """Added when the node is full and its engine has room."""
    decrease: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.7
    """Multiplied by when the engine preempts sequences or lets them wait."""
    highest_kv_use: Annotated[float, Field(gt=0.0, le=1.0)] = 0.85
    """The part of the engine's KV cache above which nothing is added."""
    period_seconds: PositiveFloat = 5.0
    """How often the engine is asked."""


class RolloutConfig(Section):
    nodes: PositiveInt = 1
    """How many nodes `leeway up` starts; with a budget of 0, each takes its share of a batch."""
    concurrency: PositiveInt | Literal["auto"] = 64
    """Sequences that a node generates at once, or sessions that it has open. `auto`: each node
    tunes it to its engine while the run lasts, within `auto`'s limits."""
    auto: AutoConcurrencyConfig = AutoConcurrencyConfig()
    prefetch_groups: NonNegativeInt = 0
    """Groups that a node leases before it has places for them, so that one that falls free is taken
    at once and not after a way to the queue and back: worth 1 or 2 where the queue is far away."""
    update_mode: UpdateMode = UpdateMode.IN_PLACE
    heartbeat_seconds: PositiveFloat = 5.0
    drain_seconds: PositiveFloat = 3.0
    """After SIGTERM a node returns its partial generations within this time."""
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    sandbox: SandboxConfig = SandboxConfig()

    @property
    def most_concurrency(self) -> int:
        """What an engine must be able to take."""
        return self.auto.highest if self.concurrency == "auto" else self.concurrency
