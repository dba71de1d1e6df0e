"""How a model is laid out over ranks: the line `trainer.layout`, e.g. `tp=2,pp=2,dp=1`.

Pure. Parsed and checked at start, before any process group exists, so that a mistake ends the run
with its remedy rather than in a collective that never returns.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields

from leeway.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a layout must divide. `experts` is 0 for a dense model."""

    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    experts: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks in each dimension.

    Attributes:
        tp: Tensor parallel: each matrix is cut; sequences too wherever matrices are not (sequence
            parallel).
        pp: Pipeline stages.
        dp: Data parallel: each holds other micro-batches. Optimizer state is cut over them, with
            the torch backend weights and gradients too.
        cp: Context parallel: each holds a part of every sequence.
        ep: Expert parallel: experts are spread over so many of the tp * cp * dp ranks of a stage.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1

    @classmethod
    def parse(cls, text: str, world: int) -> Layout:
        """
        Args:
            text: "name=ranks" with commas between; what is not named is 1, but dp: the ranks that
                are left. Empty: dp alone.
            world: Number of ranks, as torchrun starts them.

        Raises:
            ConfigError: It says something that is not a layout of so many ranks.
        """
        field = f"trainer.layout = {text!r}"
        names = [f.name for f in fields(cls)]
        sizes: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in names or name in sizes or not value.isdecimal() or int(value) < 1:
                raise ConfigError(
                    f"{field}: {part!r} is not NAME=RANKS; use each of {', '.join(names)} at most "
                    "once, e.g. tp=2,pp=2,dp=1"
                )
            sizes[name] = int(value)
        of_a_replica = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
        sizes.setdefault("dp", max(1, world // of_a_replica))
        layout = cls(**sizes)
        if layout.world != world:
            remedy = f"start a multiple of {of_a_replica} with torchrun, or change a factor"
            if "dp=" in text:
                remedy = "start so many with torchrun, or leave dp out: it follows from the ranks"
            raise ConfigError(
                f"{field}: tp * pp * cp * dp = {layout.world}, but the trainer has {world} ranks; "
                f"{remedy}"
            )
        stage = layout.tp * layout.cp * layout.dp
        if stage % layout.ep:
            raise ConfigError(
                f"{field}: ep = {layout.ep} does not divide tp * cp * dp = {stage}; use a divisor"
            )
        return layout

    @classmethod
    def allowed(cls, text: str, step: int, most: int) -> list[int]:
        """Of `step`, 2 * `step`, ..., `most` ranks those of which the line is a layout: with how
        many a trainer goes on that loses hosts of `step` ranks."""
        found = []
        for world in range(step, most + 1, step):
            with suppress(ConfigError):
                found.append(cls.parse(text, world).world)
        return found

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def row_multiple(self) -> int:
        """A micro-batch's tokens are filled up to a multiple of this, to be cut evenly."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    def check(self, model: ModelShape) -> None:
        """
        Raises:
            ConfigError: The model cannot be cut like this.
        """
        for name, parts, what, size in (
            ("tp", self.tp, "attention heads", model.heads),
            ("tp", self.tp, "key-value heads", model.key_value_heads),
            ("tp", self.tp, "units of the feed-forward layers", model.intermediate),
            ("tp", self.tp, "tokens of the vocabulary", model.vocabulary),
            ("pp", self.pp, "layers", model.layers),
            ("ep", self.ep, "experts", model.experts),
        ):
            if size % parts or (name == "ep" and parts > 1 and not size):
                raise ConfigError(
                    f"trainer.layout: {name} = {parts} does not divide the model's {size} {what}; "
                    "use a divisor"
                )
        if model.experts and self.ep % self.tp:
            # Megatron sums gradients of experts that are not spread as if tp ranks were equal.
            raise ConfigError(
                f"trainer.layout: ep = {self.ep} with tp = {self.tp}: a model with experts needs "
                "ep to be a multiple of tp"
            )
