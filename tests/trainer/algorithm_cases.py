"""Every legal composition of losses and corrections, as a hypothesis strategy."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from leeway.algorithm import (
    AdvantageConfig,
    Aggregation,
    AlgorithmConfig,
    Baseline,
    BoundAction,
    KlConfig,
    KlEstimator,
    KlPlace,
    Level,
    Normalise,
    PolicyConfig,
    PolicyLoss,
    Proximal,
    RejectConfig,
    RejectLevel,
    WeightConfig,
)

# Those of a critic need its values: see test_critic.py.
ADVANTAGES = [
    AdvantageConfig(baseline=baseline, normalise=normalise)
    for baseline in Baseline
    for normalise in Normalise
    if baseline is not Baseline.CRITIC and (baseline, normalise) != (Baseline.NONE, Normalise.GROUP)
]
POLICIES = [PolicyConfig(loss=loss) for loss in PolicyLoss] + [PolicyConfig(dual_clip=3.0)]
WEIGHTS = [
    WeightConfig(level=level, action=action, cap=2.0, floor=floor)
    for level in Level
    for action, floor in ((BoundAction.TRUNCATE, 0.0), (BoundAction.MASK, 0.5))
]
REJECTIONS = [
    RejectConfig(
        measure=measure,
        level=level,
        lower=0.8 if measure is KlEstimator.K1 else None,
        upper=1.3 if measure is KlEstimator.K1 else 0.1,
        negative_only=negative,
    )
    for measure in KlEstimator
    for level in RejectLevel
    for negative in (False, True)
]
KLS = [
    KlConfig(),
    *(
        KlConfig(coefficient=0.1, estimator=e, place=KlPlace.LOSS)
        for e in (KlEstimator.K2, KlEstimator.K3, KlEstimator.ABS)
    ),
    KlConfig(coefficient=0.1, estimator=KlEstimator.K1, place=KlPlace.ADVANTAGE),
]


@st.composite
def algorithms(draw: Any) -> AlgorithmConfig:
    policy = draw(st.sampled_from(POLICIES))
    places = list(Proximal) if policy.loss is not PolicyLoss.AIPO else [Proximal.BEHAVIOUR]
    proximal = draw(st.sampled_from(places))
    anchored = proximal is Proximal.BEHAVIOUR
    moments = [None] if proximal is Proximal.INTERPOLATED else [None, 0.04]
    return AlgorithmConfig(
        advantage=draw(st.sampled_from(ADVANTAGES)),
        policy=policy,
        proximal=proximal,
        weight=WeightConfig() if anchored else draw(st.sampled_from(WEIGHTS)),
        reject=tuple(draw(st.lists(st.sampled_from(REJECTIONS), max_size=2))),
        second_moment=draw(st.sampled_from(moments)),
        kl=draw(st.sampled_from(KLS)),
        entropy_coefficient=draw(st.sampled_from([0.0, 0.01])),
        aggregation=draw(st.sampled_from(list(Aggregation))),
    )
