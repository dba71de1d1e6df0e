"""Which backend, on which ranks: what `trainer.backend` and `trainer.layout` ask for.

One process trains on its own. Started by torchrun, its ranks share the model: the first one gets a
`Backend` that makes the others follow, and they know nothing else of the run.

    torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 -m leeway.cli trainer run.yaml
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leeway.config import TrainerConfig
from leeway.errors import ConfigError
from leeway.health import HEALTH
from trainer_service.backends.base import Backend
from trainer_service.backends.distributed import Leader, RankBackend, follow
from trainer_service.backends.layout import Layout
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.backends.world import World, join, ranks

MARGIN_SECONDS = 900.0
"""What a rank waits for the leader's next command beyond the leader's own wait for a batch: time to
publish, evaluate and begin."""


@contextmanager
def backend(config: TrainerConfig, model: Path, reference: Path | None) -> Iterator[Backend | None]:
    """The leader's backend; None on the other ranks, once it has let them go. All ranks enter.

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
        yield TorchBackend(model, config, reference=reference)
        return
    with join(layout, config.batch_seconds + MARGIN_SECONDS) as world:
        own = _on_rank(config, model, reference, world)
        if world.leads:
            leader = Leader(own, world)
            yield leader
            # Not when it failed: ranks may be in the middle of a collective, and end with torchrun.
            leader.end()
        else:
            HEALTH.set_ready()
            follow(own, world)
            yield None


def _on_rank(
    config: TrainerConfig, model: Path, reference: Path | None, world: World
) -> RankBackend:
    if config.backend == "torch":
        return TorchBackend(model, config, world=world, reference=reference)
    try:
        from trainer_service.backends.megatron.backend import MegatronBackend
    except ImportError as error:
        raise ConfigError(
            f"trainer.backend = megatron: {error}; install leeway[megatron], on Python 3.11"
        ) from error
    return MegatronBackend(model, config, world=world, reference=reference)
