"""The one configuration schema, read by every process of a run.

Sources, later ones winning: the YAML file, environment variables (`LEEWAY__TRAINER__LR=1e-5`) and
dotted overrides (`trainer.lr=1e-5`). An unknown key is an error that suggests the nearest known
one.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import yaml
from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    model_validator,
)

from leeway.algorithm import AlgorithmConfig, PolicyLoss, Proximal
from leeway.errors import ConfigError
from leeway.section import Section

ENV_PREFIX = "LEEWAY__"
LOOPBACK_ANY_PORT = "127.0.0.1:0"


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "run"
    """Names the run's directory and its keys in Redis."""
    seed: NonNegativeInt = 0
    directory: Path = Path("runs")
    """Holds one directory a run."""

    @property
    def path(self) -> Path:
        return self.directory / self.name


class ModelConfig(Section):
    path: str
    """A Hugging Face model directory, or the name of a model that Leeway can fetch
    (smollm2-135m-instruct)."""
    context: PositiveInt | None = None
    """Longest prompt + answer in tokens; by default what the model allows."""


class ReasoningGymConfig(Section):
    dataset: str
    """Name of a `reasoning-gym` dataset, e.g. chain_sum."""
    args: dict[str, Any] = Field(default_factory=dict)
    """The dataset's own options."""


class ExampleConfig(Section):
    """A worked example: what a user asked, and how it was answered."""

    user: str
    assistant: str


class EndpointConfig(Section):
    """A model that others serve, behind an OpenAI-compatible server."""

    url: Annotated[str, Field(pattern=r"^https?://")]
    """Its routes lie below, e.g. http://judge.example:8000/v1."""
    model: str
    """The name under which it is served there."""
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    """Holds the key instead."""
    concurrency: PositiveInt = 8
    """Requests that a node has under way there at once, over all its reward processes."""
    seconds: PositiveFloat = 60.0
    """Deadline of one question, waiting for its turn and retries included."""

    @model_validator(mode="after")
    def _one_key(self) -> EndpointConfig:
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("give one of api_key and api_key_file")
        return self

    def key(self) -> str | None:
        """Raises `ConfigError` when its file cannot be read."""
        if self.api_key_file is None:
            return self.api_key.get_secret_value() if self.api_key is not None else None
        try:
            return self.api_key_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"api_key_file = {self.api_key_file}: {error.strerror}") from error


class TaskConfig(Section):
    """Where prompts come from and how answers are scored. Give exactly one source, and at most one
    of `reward`, `environment` and `agent`."""

    reasoning_gym: ReasoningGymConfig | None = None
    jsonl: Path | None = None
    """A file of one JSON object a line, with `prompt` (text or chat messages), `answer`, and any
    other columns."""
    bad_rows: Literal["skip", "stop"] = "skip"
    """What an unreadable row of `jsonl` does: it is left out, counted and reported, or it ends the
    run."""
    system_prompt: str | None = None
    """By default what the model's chat template says."""
    examples: tuple[ExampleConfig, ...] = ()
    """Turns that come before every prompt and show how to answer."""
    keep: str | None = None
    """`module:function` or `path/to/file.py:function`, called as `keep(**columns) -> bool` on each
    row of the source: those for which it is false are neither trained on nor held out."""
    reward: str | None = None
    """`module:function` or `path/to/file.py:function`, called as `reward(completion, **columns)`.
    By default a reasoning-gym source scores with its dataset's own scorer."""
    reward_seconds: PositiveFloat = 10.0
    """Deadline of one reward call, without what judges take; the process that misses it is
    killed."""
    reward_processes: PositiveInt = 1
    judges: dict[Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]*$")], EndpointConfig] = Field(
        default_factory=dict
    )
    """By name: a reward function, or an environment's `reset`, gets each that it has a parameter
    for."""
    environment: str | None = None
    """`module:Class` or `path/to/file.py:Class`, with `reset(**columns)` and tools or
    `step(action)`."""
    environment_seconds: PositiveFloat = 60.0
    """Deadline of one of its calls; the process that misses it is killed."""
    environment_processes: PositiveInt = 64
    """Episodes at once: each has a process of its own."""
    environment_turns: PositiveInt = 16
    """Most answers of the model in an episode."""
    agent: str | tuple[str, ...] | None = None
    """`module:function` or `path/to/file.py:function`, an `async def run(task, session)`; or a
    command line, started for each session; or "external": programs that run elsewhere open
    sessions."""
    session_seconds: PositiveFloat = 600.0
    """Deadline of one session of an environment or agent."""
    memory_bytes: PositiveInt = 4 << 30
    """What each process with a reward, environment or agent function may have of its own."""
    heldout: NonNegativeInt = 0
    """So many problems are kept out of training and scored before and after."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskConfig:
        if (self.reasoning_gym is None) == (self.jsonl is None):
            raise ValueError("give exactly one source: task.reasoning_gym or task.jsonl")
        ways = [self.reward, self.environment, self.agent]
        given = sum(way is not None for way in ways)
        if given > 1:
            raise ValueError("give one of task.reward, task.environment and task.agent")
        if self.judges and self.reward is None and self.environment is None:
            raise ValueError("task.judges are asked by task.reward or task.environment; give one")
        return self

    def check_scored(self) -> None:
        """What a run with rollouts needs beyond one that learns from written answers.

        Raises:
            ConfigError: Nothing would score an answer.
        """
        if self.jsonl is not None and (self.reward or self.environment or self.agent) is None:
            raise ConfigError(
                "task.jsonl needs task.reward, e.g. my_rewards.py:reward, or task.environment or "
                "task.agent"
            )


class SamplingConfig(Section):
    """How answers are drawn; the same on both sides of the queue."""

    group_size: PositiveInt = 8
    max_new_tokens: PositiveInt = 256
    temperature: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegativeInt = 0


class OverBudget(StrEnum):
    """What happens at dequeue to data that is over the staleness budget."""

    MASK = "mask"
    DROP = "drop"
    KEEP = "keep"


class AutoBudgetConfig(Section):
    """Limits and bounds of the controller that `staleness.budget: auto` turns on."""

    lowest: PositiveInt = 1
    highest: PositiveInt = 8
    waiting_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    """The budget is widened when the trainer waits for more than this share of its time while
    admission is at the budget: then each side waits for the other."""
    lowest_sample_size: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """The health band: `effective_sample_size` at least this,"""
    highest_chi2: PositiveFloat = 1.0
    """`chi2_token`, the second moment of the off-policy ratio less 1, at most this,"""
    highest_clip_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """and `clip_fraction` at most this. Outside the band the budget is halved."""
    margin: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """It is widened only if health is inside the band by this part of each bound."""
    forget_steps: PositiveInt = 50
    """A budget that was unhealthy is not tried again for so many steps."""

    @model_validator(mode="after")
    def _ordered(self) -> AutoBudgetConfig:
        if self.lowest > self.highest:
            raise ValueError(f"lowest = {self.lowest} is above highest = {self.highest}")
        return self


class StalenessConfig(Section):
    budget: NonNegativeInt | Literal["auto"] = 2
    """eta: the largest staleness, in policy versions, that may enter an optimizer step. `auto`: the
    trainer tunes it while the run lasts, within `auto`'s limits."""
    auto: AutoBudgetConfig = AutoBudgetConfig()
    over_budget: OverBudget = OverBudget.MASK
    max_reissues: NonNegativeInt = 2
    """How often a task whose group was dropped as stale is tried again."""
    patience_seconds: NonNegativeFloat = 60.0
    """With `drop`: how long a batch is held for a running group that the next version would make
    stale. Without it, tasks that take longer than the budget allows would never be trained."""

    @property
    def first_budget(self) -> int:
        """The budget that a run begins with."""
        return self.auto.lowest if self.budget == "auto" else self.budget


class QueueConfig(Section):
    address: str = LOOPBACK_ANY_PORT
    """host:port; the service binds to it, nodes and trainer dial it."""
    page_address: str | None = None
    """host:port at which the service shows the run as a web page, read-only; by default none. Off
    loopback it takes the operator's token: `leeway page` prints a link."""
    redis_url: SecretStr | None = None
    """By default `REDIS_URL`, or else an embedded server."""
    redis_password_file: Path | None = None
    """Holds the password, so that it need not stand in redis_url."""
    lease_seconds: PositiveFloat = 60.0
    """A node that is silent for so long loses its work to another."""
    stall_seconds: PositiveFloat = 1800.0
    """A lease whose node reports no new token for so long is taken away although the node lives."""
    max_attempts: PositiveInt = 3
    max_bytes: PositiveInt = 4 << 30
    """Payload bytes the queue may hold; beyond, admission pauses and pushes are held back."""
    max_message_bytes: PositiveInt = 64 << 20
    filter_equal_scores: bool = True
    """End groups whose scores are all equal: they carry no signal for group-relative advantages."""
    filter_longer_than: PositiveInt | None = None
    """End groups in which a response has more tokens than this; by default none."""
    group_release: Literal["complete", "streaming"] = "complete"
    """`streaming`: trajectories are queued and trained as they complete, each a group of its own,
    so that none waits for the slowest answer to its prompt; for advantages that do not compare
    the answers to a prompt (trainer.algorithm.advantage.baseline=none)."""
    min_group: PositiveInt | None = None
    """Fewest trajectories a group may be trained with after failures; by default all."""


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

    @model_validator(mode="after")
    def _one_server(self) -> EngineConfig:
        servers = (self.url is not None) + (self.command is not None)
        if servers != (self.kind != "torch"):
            raise ValueError(
                f"engine.kind = {self.kind}: sglang and vllm need one of engine.url and "
                "engine.command; torch needs none"
            )
        return self


class AutoConcurrencyConfig(Section):
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

    @model_validator(mode="after")
    def _ordered(self) -> AutoConcurrencyConfig:
        if self.lowest > self.highest:
            raise ValueError(f"lowest = {self.lowest} is above highest = {self.highest}")
        return self


class RolloutConfig(Section):
    nodes: PositiveInt = 1
    """How many nodes `leeway up` starts; with a budget of 0, each takes its share of a batch."""
    concurrency: PositiveInt | Literal["auto"] = 64
    """Sequences that a node generates at once, or sessions that it has open. `auto`: each node
    tunes it to its engine while the run lasts, within `auto`'s limits."""
    auto: AutoConcurrencyConfig = AutoConcurrencyConfig()
    update_mode: UpdateMode = UpdateMode.IN_PLACE
    heartbeat_seconds: PositiveFloat = 5.0
    drain_seconds: PositiveFloat = 3.0
    """After SIGTERM a node returns its partial generations within this time."""
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()

    @property
    def most_concurrency(self) -> int:
        """What an engine must be able to take."""
        return self.auto.highest if self.concurrency == "auto" else self.concurrency


class CriticConfig(Section):
    """The critic of `algorithm.advantage.baseline: critic`: a model of its own, of as many tokens
    as the policy, with a value head. All its weights are trained, as the trainer's other settings
    say."""

    model: str | None = None
    """A model directory or name, or a reward model's: a head of one label is kept. By default the
    model that training begins with; a new head says 0."""
    lr: PositiveFloat = 1e-5
    value_clip: PositiveFloat = 0.5
    """A value counts as moved by at most so much in one batch."""


class TrainerConfig(Section):
    steps: PositiveInt = 100
    """Batches to train on."""
    batch_groups: PositiveInt = 8
    """B: groups in a batch."""
    minibatches: PositiveInt = 1
    """Optimizer steps a batch is split into."""
    microbatch_tokens: PositiveInt = 8192
    """Most packed tokens in one forward and backward pass."""
    lr: PositiveFloat = 1e-6
    warmup_steps: NonNegativeInt = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    checkpoint_every: PositiveInt = 50
    checkpoints_kept: PositiveInt = 2
    batch_seconds: PositiveFloat = 600.0
    """How long the trainer waits for a batch before the run ends with a reason."""
    reference: str | None = None
    """The model that `algorithm.kl` is measured against, or a teacher's; by default the model that
    training begins with."""
    backend: Literal["torch", "megatron"] = "torch"
    """`torch`: any Hugging Face model, FSDP2 over several ranks. `megatron`: docs/backends.md."""
    ranks: PositiveInt = 1
    """Processes that `leeway up` starts the trainer as, by torchrun; elsewhere torchrun says it."""
    layout: str = ""
    """How the model lies over the ranks, e.g. tp=2,pp=2,dp=1; by default dp alone."""
    activation_checkpointing: bool = False
    """Compute a layer's activations again in the backward pass instead of keeping them."""
    cpu_offload: bool = False
    """Keep masters and optimizer in the hosts' memory, when the model is computed on GPUs."""
    lora_rank: NonNegativeInt = 0
    """Train low-rank adapters of so many dimensions instead of all weights; 0 turns it off."""
    lora_alpha: PositiveInt = 32
    """Adapters count alpha / rank."""
    lora_publish: Literal["merged", "adapters"] = "merged"
    """`merged`: nodes get the sums of weights and adapters, rounded to bf16; any engine will do.
    `adapters`: they get the adapters alone, which are small, and add them as the trainer does; for
    the torch engine."""
    critic: CriticConfig = CriticConfig()
    dpo_beta: PositiveFloat = 0.1
    """`leeway dpo`: how far from the reference a preference may pull; larger stays nearer."""
    algorithm: AlgorithmConfig = AlgorithmConfig()

    @model_validator(mode="after")
    def _the_ratio_is_not_always_1(self) -> TrainerConfig:
        loss = self.algorithm.policy.loss
        if (
            self.minibatches == 1
            and self.algorithm.proximal is Proximal.RECOMPUTED
            and loss not in (PolicyLoss.PPO, PolicyLoss.REINFORCE)
        ):
            raise ValueError(
                f"algorithm.policy.loss = {loss} with minibatches = 1 and algorithm.proximal = "
                "recomputed: pi_theta / pi_prox is 1 at every token, so that the loss would be "
                "policy.loss=reinforce; use algorithm.proximal=behaviour or minibatches=2"
            )
        if self.reference is not None and not self.algorithm.needs_reference:
            raise ValueError(
                f"reference = {self.reference!r} with algorithm.kl.coefficient = 0 would not be "
                "used; give algorithm.kl.coefficient"
            )
        return self

    @model_validator(mode="after")
    def _a_critic_where_one_can_be(self) -> TrainerConfig:
        if not self.algorithm.advantage.needs_critic:
            if self.critic != CriticConfig():
                raise ValueError(
                    "critic would not be used with algorithm.advantage.baseline = "
                    f"{self.algorithm.advantage.baseline}; use baseline=critic, normalise=batch"
                )
        elif self.backend == "megatron":
            raise ValueError(
                "algorithm.advantage.baseline = critic with backend = megatron: value heads are "
                "the torch backend's; use backend=torch, or a baseline without a critic"
            )
        return self


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
    """A client's key, one a line, the first signs; the file is named after the role: rollout,
    trainer or operator. It is read again when it changes."""
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


class Config(Section):
    """The whole configuration of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    task: TaskConfig
    sampling: SamplingConfig = SamplingConfig()
    staleness: StalenessConfig = StalenessConfig()
    queue: QueueConfig = QueueConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    security: SecurityConfig = SecurityConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.trainer.algorithm.advantage.relative_to_group and self.queued_group_size < 2:
            if self.queue.group_release == "streaming":
                raise ValueError(
                    "queue.group_release = streaming: trainer.algorithm.advantage.baseline = "
                    f"{self.trainer.algorithm.advantage.baseline} compares the answers to a "
                    "prompt, which must come together; use baseline=none with normalise=batch, or "
                    "group_release=complete"
                )
            raise ValueError(
                "sampling.group_size = 1: advantages are relative to the group, so that the reward "
                "would vanish; sample each prompt at least twice"
            )
        learns_from_rewards = self.trainer.algorithm.advantage.reward_coefficient > 0.0
        if self.queue.filter_equal_scores and not learns_from_rewards:
            raise ValueError(
                "queue.filter_equal_scores = true drops groups by their scores, from which "
                "trainer.algorithm.advantage.reward_coefficient = 0 does not learn; use "
                "queue.filter_equal_scores=false"
            )
        if self.trainer.lora_publish == "adapters" and not (
            self.trainer.lora_rank and self.rollout.engine.kind == "torch"
        ):
            raise ValueError(
                "trainer.lora_publish = adapters with trainer.lora_rank = "
                f"{self.trainer.lora_rank} and rollout.engine.kind = {self.rollout.engine.kind}: "
                "it takes adapters and an engine that adds them; use lora_publish=merged"
            )
        if self.rollout.concurrency == "auto" and self.rollout.auto.lowest < self.queued_group_size:
            raise ValueError(
                f"rollout.auto.lowest = {self.rollout.auto.lowest} holds no group of "
                f"sampling.group_size = {self.sampling.group_size}; use that or more"
            )
        if self.trainer.batch_groups % self.trainer.minibatches:
            raise ValueError(
                f"trainer.minibatches = {self.trainer.minibatches} does not divide "
                f"trainer.batch_groups = {self.trainer.batch_groups}"
            )
        if self.queue.min_group is not None and not (
            2 <= self.queue.min_group <= self.queued_group_size
        ):
            raise ValueError(
                f"queue.min_group = {self.queue.min_group}: use 2 to sampling.group_size = "
                f"{self.sampling.group_size}, and group_release=complete"
            )
        return self

    @property
    def queued_group_size(self) -> int:
        """Trajectories of a group in the queue: with streaming release each is one of its own."""
        return 1 if self.queue.group_release == "streaming" else self.sampling.group_size

    @property
    def queued_batch_groups(self) -> int:
        """Groups of the queue that make a batch; the same number of trajectories either way."""
        return self.trainer.batch_groups * (self.sampling.group_size // self.queued_group_size)

    def to_yaml(self, secret: str | None = "(secret)") -> str:
        """The resolved configuration.

        Args:
            secret: Stands in place of every secret that is set.
        """
        return yaml.safe_dump(_plain(self.model_dump(), secret), sort_keys=False)


def _plain(value: Any, secret: str | None) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item, secret) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, secret) for item in value]
    if isinstance(value, SecretStr):
        return secret
    if isinstance(value, StrEnum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def load(
    path: Path | None, overrides: Iterable[str] = (), environ: Mapping[str, str] = os.environ
) -> Config:
    """Reads, merges and validates.

    Raises:
        ConfigError: naming the key, its value and the remedy, one line a fault.
    """
    tree = _read_yaml(path) if path is not None else {}
    for name, value in environ.items():
        if name.startswith(ENV_PREFIX):
            _assign(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), value, name)
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"override {override!r}: write key=value, e.g. trainer.lr=1e-5")
        _assign(tree, key.strip().split("."), value, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors()]
        raise ConfigError("\n".join([f"{path or 'configuration'}:", *lines])) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: expected sections such as `model:`, found {type(tree).__name__}"
        )
    return tree


def _assign(tree: dict[str, Any], keys: list[str], text: str, source: str) -> None:
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{source}: {key!r} is a value, not a section")
        node = child
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: the value is not YAML: {error}") from error
    # YAML 1.1 reads "1e-5" (without a dot) as text.
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    node[keys[-1]] = value


def _explain(fault: Any) -> str:
    location = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        section = _section_at(fault["loc"][:-1])
        names = list(section.model_fields) if section is not None else []
        near = difflib.get_close_matches(str(fault["loc"][-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
        return f"  {location}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"  {location}: required, but not given"
    message = fault["msg"].removeprefix("Value error, ")
    given = fault["input"]
    shown = "" if isinstance(given, dict | BaseModel) else f" = {given!r}"
    return f"  {location or 'configuration'}{shown}: {message}"


def _section_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = Config
    named = False
    for part in location:
        if named:  # A key of a mapping by name: what it holds is already at hand.
            named = False
            continue
        field = section.model_fields.get(str(part)) if section is not None else None
        if field is None:
            return None
        named = get_origin(field.annotation) is dict
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        section = next(
            (c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None
        )
    return section
