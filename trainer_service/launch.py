"""Which backend, on which ranks: what `trainer.backend` and `trainer.layout` ask for.

One process trains on its own. Started by torchrun, its ranks share the models: the first one gets
`Backend`s that make the others follow, and they know nothing else of the run. With `--nnodes
MIN:MAX` a start may have fewer ranks, or more, than the one before: the layout's dp follows.

    torchrun --nnodes 1:2 --nproc-per-node 8 --max-restarts 20 -m leeway.cli trainer run.yaml
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import structlog
from torch import nn

from leeway.config import TrainerConfig
from leeway.errors import ConfigError
from leeway.health import HEALTH
from trainer_service.backends import torch_model
from trainer_service.backends.distributed import Leader, RankBackend, follow
from trainer_service.backends.layout import Layout
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.backends.world import World, join, ranks, ranks_of_a_host
from trainer_service.learners import Learners

log = structlog.get_logger(__name__)

MARGIN_SECONDS = 900.0
"""What a rank waits for the leader's next command beyond the leader's own wait for a batch: time to
publish, evaluate and begin."""


@contextmanager
def learners(
    config: TrainerConfig, model: Path, reference: Path | None = None, critic: Path | None = None
) -> Iterator[Learners | None]:
    """The leader's models; None on the other ranks, once it has let them go. All ranks enter.

    Raises:
        ConfigError: The layout does not fit the ranks or the model, or the backend is not
            installed.
        DeadlineError: Ranks did not meet.
    """
    layout = Layout.parse(config.layout, ranks())
    if config.backend == "torch" and layout.world != layout.dp:
        raise ConfigError(
            f"trainer.layout = {config.layout!r}: the torch backend cuts a model over dp alone; "
            "use trainer.backend=megatron"
        )
    if config.backend == "torch" and layout.world == 1:
        _announce(config, layout)
        yield Learners(*_load(config, model, reference, critic))
        return
    with join(layout, config.batch_seconds + MARGIN_SECONDS) as world:
        models = _load(config, model, reference, critic, world)
        if world.leads:
            _announce(config, layout)
            leaders = Leader.of(models, world)
            yield Learners(*leaders)
            # Not when it failed: ranks may be in the middle of a collective, and end with torchrun.
            leaders[0].end()
        else:
            HEALTH.set_ready()
            follow(models, world)
            yield None


def _announce(config: TrainerConfig, layout: Layout) -> None:
    """Says with how many ranks this life trains, and with how many it could, hosts being lost."""
    allowed = Layout.allowed(config.layout, ranks_of_a_host(), layout.world)
    log.info("layout", **asdict(layout), ranks=layout.world, goes_on_with_ranks=allowed)


def _load(
    config: TrainerConfig,
    model: Path,
    reference: Path | None,
    critic: Path | None,
    world: World | None = None,
) -> list[RankBackend]:
    """This rank's part of the policy and, where there is one, of the critic."""
    backend, values = _kinds(config)
    models = [backend(model, config, world=world, reference=reference)]
    if critic is not None:
        own = config.model_copy(update={"lr": config.critic.lr, "lora_rank": 0})
        models.append(backend(critic, own, world=world, kind=values))
    return models


def _kinds(config: TrainerConfig) -> tuple[Callable[..., RankBackend], type[nn.Module]]:
    """The backend, and its kind of model that is a critic."""
    if config.backend == "torch":
        return TorchBackend, torch_model.ValueModel
    try:
        from trainer_service.backends.megatron import model
        from trainer_service.backends.megatron.backend import MegatronBackend
    except ImportError as error:
        raise ConfigError(
            f"trainer.backend = megatron: {error}; install leeway[megatron], on Python 3.11"
        ) from error
    return MegatronBackend, model.ValueModel
