"""No configuration trains on stale data as if it were fresh, or does what it does not say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from leeway.algorithm import AlgorithmConfig
from leeway.config import Config, load
from leeway.errors import ConfigError
from tests.trainer.algorithm_cases import algorithms

MINIMAL = ["model.path=m", "task.jsonl=rows.jsonl", "task.reward=r.py:reward"]
CASES = {
    # A ratio that would be 1 at every token, or count twice.
    "trainer.algorithm.proximal=behaviour trainer.algorithm.weight.cap=2": "is 1 at every token",
    "trainer.algorithm.policy.loss=gspo": "is 1 at every token",
    "trainer.algorithm.policy.loss=dppo trainer.minibatches=1": "is 1 at every token",
    "trainer.algorithm.policy.loss=aipo trainer.minibatches=2": "use proximal=behaviour",
    "trainer.algorithm.proximal=interpolated trainer.algorithm.second_moment=0.04": "saves",
    # Bounds that on-policy tokens would break.
    "trainer.algorithm.weight.cap=0.9": "greater than or equal to 1",
    "trainer.algorithm.reject=[{measure: k1, upper: 0.9}]": "must lie between the two",
    # Settings that would have no effect.
    "trainer.algorithm.weight.floor=0.5": "use action=mask",
    "trainer.algorithm.reject=[{measure: k3}]": "nothing would be rejected",
    "trainer.algorithm.reject=[{measure: k3, lower: 0.1, upper: 1}]": "only k1 has a lower bound",
    "trainer.algorithm.policy.loss=reinforce trainer.algorithm.policy.clip_low=0.1": "no meaning",
    "trainer.algorithm.policy.tau_positive=2": "no meaning with loss = ppo",
    "trainer.algorithm.policy.loss=sapo trainer.algorithm.policy.dual_clip=3": "no meaning",
    "trainer.algorithm.aggregation_constant=9": "use aggregation=constant",
    "trainer.reference=teacher": "would not be used",
    "trainer.algorithm.advantage.reward_coefficient=0": "nothing would be learned",
    # Gradients that are not what they seem.
    "trainer.algorithm.kl={coefficient: 0.1, estimator: k1}": "is 0 on average",
    "trainer.algorithm.kl={coefficient: 0.1, place: advantage}": "use estimator=k1",
    "trainer.algorithm.advantage={baseline: none}": "mean that was not subtracted",
    "trainer.algorithm.policy.clip_low=1.5": "never below 0",
}


@pytest.mark.parametrize("overrides", CASES)
def test_refused_with_its_remedy(overrides: str) -> None:
    separate = overrides.split(" trainer.")
    given = [separate[0], *(f"trainer.{part}" for part in separate[1:])]
    with pytest.raises(ConfigError) as caught:
        load(None, [*MINIMAL, *given], {})
    assert CASES[overrides] in str(caught.value)
    assert "trainer" in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(algorithm=algorithms())
def test_what_a_run_records_loads_again(algorithm: AlgorithmConfig) -> None:
    config = load(None, [*MINIMAL, "trainer.minibatches=2"], {})
    trainer = config.trainer.model_copy(update={"algorithm": algorithm})
    recorded = config.model_copy(update={"trainer": trainer}).model_dump()
    assert Config.model_validate(recorded).trainer.algorithm == algorithm
