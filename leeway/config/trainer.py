"""The trainer, all but its algorithm (`leeway.algorithm`)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from leeway.algorithm import AlgorithmConfig, PolicyLoss, Proximal
from leeway.section import Section


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
    warmup_batches: NonNegativeInt = 0
    """So many first batches teach the critic alone (verl's `critic_warmup`); the policy's weights
    stay as they are."""


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
    def _a_critic_is_used(self) -> TrainerConfig:
        if self.critic != CriticConfig() and not self.algorithm.advantage.needs_critic:
            raise ValueError(
                "critic would not be used with algorithm.advantage.baseline = "
                f"{self.algorithm.advantage.baseline}; use baseline=critic, normalise=batch"
            )
        return self
