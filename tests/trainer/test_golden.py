"""Values that public implementations computed; see tests/golden/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer_service.algorithms.advantages import AdvantageScale, group_relative
from trainer_service.algorithms.aggregation import Aggregation, token_weights
from trainer_service.algorithms.diagnostics import k3, token_sums
from trainer_service.algorithms.policy_loss import (
    BehaviourAction,
    BehaviourBounds,
    behaviour_weights,
    decoupled_ppo,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "losses.json").read_text())
INPUTS = {
    name: torch.tensor(values, dtype=torch.float64) for name, values in GOLDEN["inputs"].items()
}
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in GOLDEN["cases"]}
MASK = INPUTS["mask"].bool()
LENGTHS = MASK.sum(dim=1).numpy()


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=0, atol=1e-6)


def grpo(scale: AdvantageScale = AdvantageScale.GROUP_STD) -> Tensor:
    per_trajectory = group_relative(INPUTS["score"].numpy(), INPUTS["group"].numpy(), scale)
    return torch.tensor(per_trajectory)[:, None].expand(MASK.shape)


def aggregated(loss: Tensor, aggregation: Aggregation, constant: int = 1) -> float:
    weights = torch.tensor(token_weights(aggregation, LENGTHS, constant))
    return float((torch.where(MASK, loss, 0.0) * weights[:, None]).sum())


@pytest.mark.parametrize(
    ("case", "scale"),
    [
        ("advantage/grpo", AdvantageScale.GROUP_STD),
        ("advantage/dr_grpo", AdvantageScale.NONE),
    ],
)
def test_advantages(case: str, scale: AdvantageScale) -> None:
    close(torch.where(MASK, grpo(scale), 0.0), CASES[case]["out"])


@pytest.mark.parametrize(
    ("case", "aggregation", "constant"),
    [
        ("token-mean", Aggregation.TOKEN_MEAN, 1),
        ("seq-mean-token-sum", Aggregation.SEQ_MEAN_TOKEN_SUM, 1),
        ("seq-mean-token-mean", Aggregation.SEQ_MEAN_TOKEN_MEAN, 1),
        ("seq-mean-token-sum-norm", Aggregation.CONSTANT, 9),
    ],
)
def test_aggregation(case: str, aggregation: Aggregation, constant: int) -> None:
    close(
        aggregated(INPUTS["loss_matrix"], aggregation, constant), CASES[f"aggregate/{case}"]["out"]
    )


@pytest.mark.parametrize("clip", ["", "_clip_higher"])
@pytest.mark.parametrize(
    ("case", "bounds"),
    [
        ("token_truncate_5", BehaviourBounds(BehaviourAction.TRUNCATE, 5.0)),
        ("token_truncate_1.1", BehaviourBounds(BehaviourAction.TRUNCATE, 1.1)),
        ("token_mask_0.5_1.5", BehaviourBounds(BehaviourAction.MASK, 1.5, 0.5)),
    ],
)
def test_decoupled_loss(case: str, clip: str, bounds: BehaviourBounds) -> None:
    golden = CASES[f"decoupled/{case}{clip}"]
    policy = decoupled_ppo(
        INPUTS["logp_current"],
        INPUTS["logp_proximal"],
        INPUTS["logp_behaviour"],
        grpo(),
        MASK,
        clip_low=golden["params"]["clip_low"],
        clip_high=golden["params"]["clip_high"],
        bounds=bounds,
    )
    close(aggregated(policy.loss, Aggregation.TOKEN_MEAN), golden["out"])


@pytest.mark.parametrize(
    ("case", "bounds"),
    [
        ("is_token_2.0", BehaviourBounds(BehaviourAction.TRUNCATE, 2.0)),
        ("is_token_1.2", BehaviourBounds(BehaviourAction.TRUNCATE, 1.2)),
        ("is_token_0.5_1.5", BehaviourBounds(BehaviourAction.MASK, 1.5, 0.5)),
    ],
)
def test_behaviour_weights(case: str, bounds: BehaviourBounds) -> None:
    weights = behaviour_weights(INPUTS["logp_proximal"], INPUTS["logp_behaviour"], MASK, bounds)
    close(weights.applied, CASES[f"correction/{case}"]["out"])


def test_diagnostics_of_proximal_against_behaviour() -> None:
    policy = decoupled_ppo(
        INPUTS["logp_current"],
        INPUTS["logp_proximal"],
        INPUTS["logp_behaviour"],
        grpo(),
        MASK,
        clip_low=0.2,
        clip_high=0.28,
        bounds=BehaviourBounds(BehaviourAction.TRUNCATE, 2.0),
    )
    metrics = token_sums(
        policy,
        total=policy.loss.sum(),
        proximal=INPUTS["logp_proximal"],
        behaviour=INPUTS["logp_behaviour"],
        entropy=torch.zeros_like(policy.loss),
        mask=MASK,
        fresh=torch.ones_like(MASK),
    ).metrics()
    kl = CASES["diagnostics/proximal_against_behaviour"]["out"]
    weights = CASES["diagnostics/importance_weights_token_2.0"]["out"]
    close(metrics["mismatch_kl_k1_mean"], kl["kl"])
    close(metrics["mismatch_kl_k3_mean"], kl["k3_kl"])
    close(metrics["behaviour_weight_mean"], weights["rollout_is_mean"])
    close(metrics["effective_sample_size"], weights["rollout_is_eff_sample_size"])
    close(metrics["cap_fraction"], weights["rollout_is_ratio_fraction_high"])
    clipped = CASES["policy/ppo_clip_asymmetric_dual"]["out"]["clip_fraction"]
    close(metrics["clip_fraction"], clipped)


def test_k3() -> None:
    close(
        k3(INPUTS["logp_current"] - INPUTS["logp_reference"])[MASK],
        torch.tensor(CASES["kl/k3"]["out"])[MASK],
    )
