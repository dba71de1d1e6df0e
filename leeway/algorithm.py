"""What is learned from a batch: the `trainer.algorithm` section of the configuration.

Four independent choices, and what may be added to them: how rewards become advantages, the policy
loss, the correction for stale data, and how token losses are averaged. The enums here are the only
ones: `trainer_service.algorithms` dispatches on them. docs/learning.md lists which settings make
which published method.

What must hold: no configuration trains on stale data as if it were fresh, and none counts an
importance ratio twice or uses one that is 1 at every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from leeway.section import Section


class Baseline(StrEnum):
    """What a trajectory's reward is compared with."""

    GROUP = "group"
    LEAVE_ONE_OUT = "leave_one_out"
    CRITIC = "critic"
    NONE = "none"


class Normalise(StrEnum):
    """What advantages are divided by."""

    GROUP = "group"
    BATCH = "batch"
    NONE = "none"


class GaeStep(StrEnum):
    """What a critic gives a value to."""

    TOKEN = "token"
    TURN = "turn"


class GaeConfig(Section):
    """Generalised advantages, with `baseline: critic`."""

    step: GaeStep = GaeStep.TOKEN
    """`turn`: each sampled answer of a conversation is one step."""
    discount: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """What a step's reward counts for the step before it."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """1: rewards as they came, less the critic's value; smaller trusts the critic more."""


class AdvantageConfig(Section):
    """From rewards to advantages. The default is GRPO's."""

    baseline: Baseline = Baseline.GROUP
    """`group`: the group's mean. `leave_one_out`: the mean of the others in the group. `critic`:
    the value that a model of its own learns (PPO); see `gae` and `trainer.critic`."""
    normalise: Normalise = Normalise.GROUP
    """`group`: divide by the group's standard deviation. `batch`: whiten over the trained tokens of
    the optimizer step."""
    turn_discount: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """What a reward counts for the turn before it, when trajectories bring rewards by turn."""
    gae: GaeConfig = GaeConfig()
    overlong_tokens: NonNegativeInt = 0
    """Answers lose up to `overlong_penalty` over the last so many tokens before
    sampling.max_new_tokens; 0 turns it off."""
    overlong_penalty: PositiveFloat = 1.0
    reward_coefficient: NonNegativeFloat = 1.0
    """0: learn from the reference model alone (on-policy distillation, with kl.place=advantage)."""

    @property
    def relative_to_group(self) -> bool:
        """Whether the answers to a prompt are compared with each other."""
        return self.baseline in (Baseline.GROUP, Baseline.LEAVE_ONE_OUT)

    @property
    def needs_critic(self) -> bool:
        return self.baseline is Baseline.CRITIC

    @model_validator(mode="after")
    def _spread_needs_a_centre(self) -> AdvantageConfig:
        if not self.relative_to_group and self.normalise is Normalise.GROUP:
            raise ValueError(
                f"normalise = group with baseline = {self.baseline} divides by the group's "
                "deviation from a mean that was not subtracted; use baseline=group, or "
                "normalise=batch or none"
            )
        return self

    @model_validator(mode="after")
    def _one_discount(self) -> AdvantageConfig:
        if self.needs_critic and self.turn_discount != 1.0:
            raise ValueError(
                f"turn_discount = {self.turn_discount} with baseline = critic: steps are "
                "discounted by gae.discount; use that, with gae.step=turn"
            )
        if not self.needs_critic and self.gae != GaeConfig():
            raise ValueError(
                f"gae with baseline = {self.baseline} would not be used; use baseline=critic"
            )
        return self


class PolicyLoss(StrEnum):
    """The policy loss, in terms of r = pi_theta / pi_prox."""

    PPO = "ppo"
    REINFORCE = "reinforce"
    GSPO = "gspo"
    GEO_MEAN = "geo_mean"
    CISPO = "cispo"
    SAPO = "sapo"
    AIPO = "aipo"
    DPPO = "dppo"


CLIPS: Mapping[PolicyLoss, tuple[float | None, float | None]] = {
    PolicyLoss.PPO: (0.2, 0.28),
    PolicyLoss.REINFORCE: (None, None),
    PolicyLoss.GSPO: (3e-4, 4e-4),
    PolicyLoss.GEO_MEAN: (0.4, 0.4),
    PolicyLoss.CISPO: (1.0, 4.0),
    PolicyLoss.SAPO: (None, None),
    PolicyLoss.AIPO: (None, 4.0),
    PolicyLoss.DPPO: (0.15, 0.15),
}
"""clip_low and clip_high that each loss's authors use; None where it has no such bound."""


class PolicyConfig(Section):
    """The policy loss and its bounds."""

    loss: PolicyLoss = PolicyLoss.PPO
    clip_low: PositiveFloat | None = None
    clip_high: PositiveFloat | None = None
    """The ratio stays from 1 - clip_low to 1 + clip_high; for `geo_mean` its logarithm from
    -clip_low to clip_high; for `dppo` the probability moves by at most so much. By default what the
    loss's authors use (`CLIPS`)."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """`ppo`: the largest ratio that counts where the advantage is negative; by default any."""
    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05
    """`sapo`: how sharply the gate closes, by the sign of the advantage."""

    @property
    def clips(self) -> tuple[float, float]:
        """clip_low and clip_high with their defaults; 0 where the loss has no such bound."""
        low, high = CLIPS[self.loss]
        return self.clip_low or low or 0.0, self.clip_high or high or 0.0

    @model_validator(mode="after")
    def _only_its_own_bounds(self) -> PolicyConfig:
        low, high = CLIPS[self.loss]
        sapo = self.loss is PolicyLoss.SAPO
        foreign = {
            "clip_low": low is None,
            "clip_high": high is None,
            "dual_clip": self.loss is not PolicyLoss.PPO,
            "tau_positive": not sapo,
            "tau_negative": not sapo,
        }
        for name, meaningless in foreign.items():
            value = getattr(self, name)
            if meaningless and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {value} has no meaning with loss = {self.loss}; leave it out, or "
                    "choose another loss"
                )
        if low is not None and self.loss is not PolicyLoss.GEO_MEAN and self.clips[0] > 1.0:
            raise ValueError(f"clip_low = {self.clip_low}: a ratio is never below 0; use up to 1")
        return self


class Proximal(StrEnum):
    """Which policy the loss stays near: pi_prox."""

    RECOMPUTED = "recomputed"
    INTERPOLATED = "interpolated"
    BEHAVIOUR = "behaviour"


class Level(StrEnum):
    """Over which tokens pi_prox / pi_behav is taken."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


class BoundAction(StrEnum):
    """What is done to a behaviour weight outside its bounds."""

    TRUNCATE = "truncate"
    MASK = "mask"


class WeightConfig(Section):
    """The behaviour weight w = pi_prox / pi_behav, which corrects for stale data."""

    level: Level = Level.TOKEN
    """`sequence`: the product over the trajectory. `geometric`: its geometric mean."""
    action: BoundAction = BoundAction.TRUNCATE
    """Above `cap`: cut to the cap, or masked out."""
    cap: Annotated[float, Field(ge=1.0)] = 5.0
    """Below 1 it would cut the weight of on-policy tokens."""
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """With `mask`, what is below is masked out as well."""

    @model_validator(mode="after")
    def _floor_needs_mask(self) -> WeightConfig:
        if self.floor > 0.0 and self.action is not BoundAction.MASK:
            raise ValueError(
                f"floor = {self.floor} has no meaning with action = truncate; use action=mask"
            )
        return self


class KlEstimator(StrEnum):
    """Estimators of KL(p || q) from tokens drawn from p, with l = log p - log q."""

    K1 = "k1"
    ABS = "abs"
    K2 = "k2"
    K3 = "k3"


class RejectLevel(StrEnum):
    """Over which tokens a measure is taken before it is compared."""

    TOKEN = "token"
    SEQ_SUM = "seq_sum"
    SEQ_MEAN = "seq_mean"
    SEQ_MAX = "seq_max"


class RejectConfig(Section):
    """Leaves tokens, or whole trajectories, out of the loss that are too far off-policy."""

    measure: KlEstimator = KlEstimator.K3
    """Of KL(pi_behav || pi_prox). With `k1` the bounds are those of the ratio pi_behav/pi_prox."""
    level: RejectLevel = RejectLevel.SEQ_MEAN
    lower: PositiveFloat | None = None
    upper: PositiveFloat | None = None
    negative_only: bool = False
    """Only where the advantage is negative."""

    @model_validator(mode="after")
    def _has_bounds(self) -> RejectConfig:
        if self.lower is None and self.upper is None:
            raise ValueError("lower and upper are both missing: nothing would be rejected")
        if self.measure is KlEstimator.K1:
            if (self.lower or 0.0) > 1.0 or (self.upper or 1.0) < 1.0:
                raise ValueError(
                    f"lower = {self.lower}, upper = {self.upper}: the ratio of on-policy tokens, "
                    "1, must lie between the two"
                )
        elif self.lower is not None:
            raise ValueError(
                f"lower = {self.lower} with measure = {self.measure}: only k1 has a lower bound"
            )
        return self


class KlPlace(StrEnum):
    """Where KL(pi_theta || reference) enters."""

    LOSS = "loss"
    REWARD = "reward"
    ADVANTAGE = "advantage"


class KlConfig(Section):
    """Keeps the policy near a frozen reference: `trainer.reference`, by default `model.path`."""

    coefficient: NonNegativeFloat = 0.0
    """0 turns it off; the reference is then not loaded."""
    estimator: KlEstimator = KlEstimator.K3
    place: KlPlace = KlPlace.LOSS
    """`loss`: a term of the loss. `reward`: its sum over a trajectory comes off the reward.
    `advantage`: each token's k1 comes off its own advantage, as on-policy distillation does."""

    @model_validator(mode="after")
    def _the_gradient_is_one(self) -> KlConfig:
        if self.coefficient == 0.0:
            return self
        if self.place is KlPlace.LOSS and self.estimator is KlEstimator.K1:
            raise ValueError(
                "estimator = k1 with place = loss: the gradient of k1 is 0 on average; use "
                "estimator=k2 or k3, or place=reward"
            )
        if self.place is KlPlace.ADVANTAGE and self.estimator is not KlEstimator.K1:
            raise ValueError(
                f"estimator = {self.estimator} with place = advantage: only k1 has the KL's "
                "gradient there; use estimator=k1"
            )
        return self


class Aggregation(StrEnum):
    """How token losses are averaged."""

    TOKEN_MEAN = "token-mean"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    CONSTANT = "constant"


class AlgorithmConfig(Section):
    """By default GRPO advantages and the decoupled PPO loss (AReaL, arXiv:2505.24298, eq. 5)."""

    advantage: AdvantageConfig = AdvantageConfig()
    policy: PolicyConfig = PolicyConfig()
    proximal: Proximal = Proximal.RECOMPUTED
    """`recomputed`: the policy at the start of the batch. `interpolated`: between it and the
    behaviour policy, by version distance (A-3PO). `behaviour`: the policy that generated the
    token; the loss's own ratio then corrects for staleness, and `weight` must not be given."""
    weight: WeightConfig = WeightConfig()
    reject: tuple[RejectConfig, ...] = ()
    second_moment: PositiveFloat | None = None
    """M2PO: tokens with the largest (log pi_prox/pi_behav)^2 are left out until the mean over the
    optimizer step is at most this; 0.04 in the paper."""
    kl: KlConfig = KlConfig()
    entropy_coefficient: NonNegativeFloat = 0.0
    """Rewards the policy for its entropy, in nats a token."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    aggregation_constant: PositiveInt | None = None
    """Tokens by which `constant` divides each trajectory; by default sampling.max_new_tokens."""

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0.0

    def needs_start(self, optimizer_steps: int) -> bool:
        """Whether the log-probabilities at the start of a batch of so many optimizer steps take a
        forward pass of their own; otherwise the first step's yields them, or nothing needs them."""
        if self.second_moment is not None:
            return True
        used = self.proximal is Proximal.RECOMPUTED or (
            self.proximal is Proximal.BEHAVIOUR and bool(self.reject)
        )
        return used and optimizer_steps > 1

    @model_validator(mode="after")
    def _ratios_count_once(self) -> AlgorithmConfig:
        anchored = self.proximal is Proximal.BEHAVIOUR
        if anchored and self.weight != WeightConfig():
            raise ValueError(
                "weight with proximal = behaviour: pi_prox / pi_behav is 1 at every token, and the "
                "loss's own ratio corrects already; leave weight out, or use proximal=recomputed"
            )
        if self.policy.loss is PolicyLoss.AIPO and not anchored:
            raise ValueError(
                f"policy.loss = aipo with proximal = {self.proximal}: its clip is that of "
                "pi_theta / pi_behav; use proximal=behaviour"
            )
        if self.second_moment is not None and self.proximal is Proximal.INTERPOLATED:
            raise ValueError(
                f"second_moment = {self.second_moment} with proximal = interpolated: it needs the "
                "forward pass that interpolation saves; use proximal=recomputed or behaviour"
            )
        return self

    @model_validator(mode="after")
    def _constant_needs_its_aggregation(self) -> AlgorithmConfig:
        constant = self.aggregation is Aggregation.CONSTANT
        if self.aggregation_constant is not None and not constant:
            raise ValueError(
                f"aggregation_constant = {self.aggregation_constant} has no meaning with "
                f"aggregation = {self.aggregation}; use aggregation=constant"
            )
        return self

    @model_validator(mode="after")
    def _something_is_learned(self) -> AlgorithmConfig:
        teacher = self.needs_reference and self.kl.place is KlPlace.ADVANTAGE
        if self.advantage.reward_coefficient == 0.0 and not teacher:
            raise ValueError(
                "advantage.reward_coefficient = 0: nothing would be learned; give kl.coefficient "
                "and kl.place=advantage, or another reward_coefficient"
            )
        return self
