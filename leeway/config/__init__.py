"""The one configuration schema, read by every process of a run.

Sources, later ones winning: the YAML file, environment variables (`LEEWAY__TRAINER__LR=1e-5`) and
dotted overrides (`trainer.lr=1e-5`). An unknown key is an error that suggests the nearest known
one.
"""

from leeway.config.loading import ENV_PREFIX, load
from leeway.config.queue import (
    AutoBudgetConfig,
    OverBudget,
    QueueConfig,
    StalenessConfig,
)
from leeway.config.rollout import (
    AutoConcurrencyConfig,
    EngineConfig,
    GatewayConfig,
    RolloutConfig,
    SandboxConfig,
    UpdateMode,
)
from leeway.config.run import ModelConfig, RunConfig
from leeway.config.schema import Config
from leeway.config.services import (
    LOOPBACK_ANY_PORT,
    SecurityConfig,
    TelemetryConfig,
    TrackerKind,
    WeightsConfig,
)
from leeway.config.task import (
    EndpointConfig,
    ExampleConfig,
    ReasoningGymConfig,
    SamplingConfig,
    TaskConfig,
)
from leeway.config.trainer import CriticConfig, TrainerConfig

__all__ = [
    "ENV_PREFIX",
    "LOOPBACK_ANY_PORT",
    "AutoBudgetConfig",
    "AutoConcurrencyConfig",
    "Config",
    "CriticConfig",
    "EndpointConfig",
    "EngineConfig",
    "ExampleConfig",
    "GatewayConfig",
    "ModelConfig",
    "OverBudget",
    "QueueConfig",
    "ReasoningGymConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "SecurityConfig",
    "StalenessConfig",
    "TaskConfig",
    "TelemetryConfig",
    "TrackerKind",
    "TrainerConfig",
    "UpdateMode",
    "WeightsConfig",
    "load",
]
