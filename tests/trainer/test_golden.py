"""Values that public implementations computed; see tests/golden/README.md. All of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leeway.algorithm import (
    AdvantageConfig,
    Aggregation,
    AlgorithmConfig,
    Baseline,
    BoundAction,
    KlEstimator,
    Level,
    Normalise,
    PolicyConfig,
    PolicyLoss,
    RejectConfig,
    RejectLevel,
    WeightConfig,
)
from trainer_service.algorithms.advantages import group_relative, whiten
from trainer_service.algorithms.aggregation import token_weights
from trainer_service.algorithms.correction import behaviour_weights, correct, rejected
from trainer_service.algorithms.critic import gae, value_loss
from trainer_service.algorithms.diagnostics import TokenSums, token_sums
from trainer_service.algorithms.kl import kl
from trainer_service.algorithms.policy_loss import TokenLosses, token_losses
from trainer_service.algorithms.tokens import Sequences, log_ratio

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "losses.json").read_text())
MATRICES = {
    name: torch.tensor(values, dtype=torch.float64) for name, values in GOLDEN["inputs"].items()
}
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in GOLDEN["cases"]}
SHAPE = MATRICES["mask"].shape
FLAT = {name: matrix.reshape(-1) for name, matrix in MATRICES.items()}
MASK = FLAT["mask"].bool()
LENGTHS = MATRICES["mask"].sum(dim=1).long().numpy()
SEQUENCES = Sequences(torch.arange(SHAPE[0]).repeat_interleave(SHAPE[1]), MASK)
PROXIMAL_TO_BEHAVIOUR = log_ratio(FLAT["logp_proximal"], FLAT["logp_behaviour"], MASK)

TESTED: set[str] = set()


def golden(name: str) -> dict[str, Any]:
    TESTED.add(name)
    return CASES[name]


def close(ours: Any, theirs: Any) -> None:
    theirs = np.asarray(theirs)
    np.testing.assert_allclose(np.asarray(ours).reshape(theirs.shape), theirs, rtol=0, atol=1e-6)


def advantages(baseline: Baseline, normalise: Normalise) -> Tensor:
    """[tokens], 0 outside the mask."""
    config = AdvantageConfig(baseline=baseline, normalise=normalise)
    of_trajectories = group_relative(FLAT["score"].tolist(), FLAT["group"].numpy(), config)
    tokens = np.repeat(np.concatenate(of_trajectories), SHAPE[1])
    if normalise is Normalise.BATCH:
        tokens[MASK.numpy()] = whiten(tokens[MASK.numpy()])
    return torch.where(MASK, torch.from_numpy(tokens), 0.0)


GRPO = advantages(Baseline.GROUP, Normalise.GROUP)


def aggregated(loss: Tensor, aggregation: Aggregation, constant: int = 1) -> float:
    weights = torch.from_numpy(token_weights(aggregation, LENGTHS, constant))
    return float((torch.where(MASK, loss, 0.0) * weights.repeat_interleave(SHAPE[1])).sum())


def losses(policy: PolicyConfig) -> TokenLosses:
    return token_losses(policy, FLAT["logp_current"], FLAT["logp_proximal"], GRPO, MASK, SEQUENCES)


@pytest.mark.parametrize(
    ("case", "baseline", "normalise"),
    [
        ("grpo", Baseline.GROUP, Normalise.GROUP),
        ("dr_grpo", Baseline.GROUP, Normalise.NONE),
        ("rloo", Baseline.LEAVE_ONE_OUT, Normalise.NONE),
        ("reinforce_plus_plus", Baseline.NONE, Normalise.BATCH),
        ("reinforce_plus_plus_baseline", Baseline.GROUP, Normalise.BATCH),
    ],
)
def test_advantages(case: str, baseline: Baseline, normalise: Normalise) -> None:
    close(advantages(baseline, normalise), golden(f"advantage/{case}")["out"])


def test_gae_whitened() -> None:
    case = golden("advantage/gae_whitened")
    per_row = [
        gae(row[:n], values[:n], case["params"]["gamma"], case["params"]["lam"])
        for row, values, n in zip(
            MATRICES["token_rewards"].numpy(),
            MATRICES["values"].numpy(),
            case["params"]["lens"],
            strict=True,
        )
    ]
    whole = whiten(np.concatenate([a for a, _ in per_row]))
    for row, ours in enumerate(np.split(whole, np.cumsum([a.size for a, _ in per_row])[:-1])):
        close(ours, case["out"]["advantages"][row][: ours.size])
        close(per_row[row][1], case["out"]["returns"][row][: ours.size])


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
        aggregated(FLAT["loss_matrix"], aggregation, constant), golden(f"aggregate/{case}")["out"]
    )


def test_ppo_clip_asymmetric_dual() -> None:
    case = golden("policy/ppo_clip_asymmetric_dual")
    given = {name: case["params"][name] for name in ("clip_low", "clip_high", "dual_clip")}
    ours = losses(PolicyConfig(loss=PolicyLoss.PPO, **given))
    close(aggregated(ours.loss, Aggregation.TOKEN_MEAN), case["out"]["loss"])
    plain = losses(PolicyConfig(loss=PolicyLoss.PPO, **(given | {"dual_clip": None})))
    close(plain.clipped.sum() / MASK.sum(), case["out"]["clip_fraction"])


@pytest.mark.parametrize(
    ("case", "aggregation"),
    [
        ("gspo", Aggregation.SEQ_MEAN_TOKEN_MEAN),
        ("cispo", Aggregation.TOKEN_MEAN),
        ("sapo", Aggregation.SEQ_MEAN_TOKEN_MEAN),
        # Its source averages over trajectories, whatever the case's parameters say.
        ("geo_mean", Aggregation.SEQ_MEAN_TOKEN_MEAN),
    ],
)
def test_policy_losses(case: str, aggregation: Aggregation) -> None:
    expected = golden(f"policy/{case}")
    names = {
        "clip_ratio_low": "clip_low",
        "clip_ratio_high": "clip_high",
        "tau_pos": "tau_positive",
        "tau_neg": "tau_negative",
    }
    given = {names[k]: v for k, v in expected["params"].items() if k in names}
    ours = losses(PolicyConfig(loss=PolicyLoss(case), **given))
    close(aggregated(ours.loss, aggregation), expected["out"])


@pytest.mark.parametrize("clip", ["", "_clip_higher"])
@pytest.mark.parametrize(
    "case",
    [
        "token_truncate_5",
        "token_truncate_1.1",
        "token_mask_0.5_1.5",
        "sequence_geometric_mask_0.9_1.1",
    ],
)
def test_decoupled_loss(case: str, clip: str) -> None:
    expected = golden(f"decoupled/{case}{clip}")
    given = expected["params"]["behaviour_weight"]
    algorithm = AlgorithmConfig(
        policy=PolicyConfig(
            clip_low=expected["params"]["clip_low"], clip_high=expected["params"]["clip_high"]
        ),
        weight=WeightConfig(
            level=Level.TOKEN if given["level"] == "token" else Level.GEOMETRIC,
            action=BoundAction.MASK if given["action"] == "mask" else BoundAction.TRUNCATE,
            cap=given["upper"],
            floor=given["lower"] or 0.0,
        ),
    )
    correction = correct(algorithm, PROXIMAL_TO_BEHAVIOUR, GRPO, MASK, SEQUENCES, np.inf)
    loss = correction.applied * losses(algorithm.policy).loss
    close(aggregated(loss, Aggregation.TOKEN_MEAN), expected["out"])


@pytest.mark.parametrize("level", [Level.TOKEN, Level.SEQUENCE])
@pytest.mark.parametrize(
    ("bounds", "action", "cap", "floor"),
    [
        ("2.0", BoundAction.TRUNCATE, 2.0, 0.0),
        ("1.2", BoundAction.TRUNCATE, 1.2, 0.0),
        ("0.5_1.5", BoundAction.MASK, 1.5, 0.5),
    ],
)
def test_behaviour_weights(
    level: Level, bounds: str, action: BoundAction, cap: float, floor: float
) -> None:
    config = WeightConfig(level=level, action=action, cap=cap, floor=floor)
    _, applied, _ = behaviour_weights(config, PROXIMAL_TO_BEHAVIOUR, MASK, SEQUENCES)
    close(applied, golden(f"correction/is_{level}_{bounds}")["out"])


@pytest.mark.parametrize(
    ("level", "measure", "bounds"),
    [
        (RejectLevel.TOKEN, KlEstimator.K1, "0.7_1.4"),
        (RejectLevel.TOKEN, KlEstimator.K2, "0.05"),
        (RejectLevel.TOKEN, KlEstimator.K3, "0.03"),
        (RejectLevel.SEQ_SUM, KlEstimator.K1, "0.5_2.0"),
        (RejectLevel.SEQ_MEAN, KlEstimator.K1, "0.9_1.1"),
        (RejectLevel.SEQ_MEAN, KlEstimator.K3, "0.03"),
        (RejectLevel.SEQ_MAX, KlEstimator.K3, "0.1"),
    ],
)
def test_rejections(level: RejectLevel, measure: KlEstimator, bounds: str) -> None:
    *lower, upper = (float(bound) for bound in bounds.split("_"))
    rule = RejectConfig(
        measure=measure, level=level, lower=lower[0] if lower else None, upper=upper
    )
    out = rejected([rule], PROXIMAL_TO_BEHAVIOUR, GRPO, MASK, SEQUENCES)
    close((MASK & ~out).double(), golden(f"correction/reject_{level}_{measure}_{bounds}")["out"])


def sums(cap: float) -> TokenSums:
    algorithm = AlgorithmConfig(weight=WeightConfig(cap=cap))
    ours = losses(algorithm.policy)
    correction = correct(algorithm, PROXIMAL_TO_BEHAVIOUR, GRPO, MASK, SEQUENCES, np.inf)
    return token_sums(
        loss=ours.loss.sum(),
        losses=ours,
        correction=correction,
        weights=correction.applied,
        off_policy=PROXIMAL_TO_BEHAVIOUR,
        reference=None,
        entropy=torch.zeros_like(ours.loss),
        mask=MASK,
        valid=MASK,
        fresh=MASK,
        sequences=SEQUENCES,
    )


def test_diagnostics_of_proximal_against_behaviour() -> None:
    expected = golden("diagnostics/proximal_against_behaviour")["out"]
    metrics = sums(2.0).metrics()
    close(metrics["mismatch_kl_k1_mean"], expected["kl"])
    close(metrics["off_policy_kl_k1_mean"], expected["kl"])
    close(metrics["mismatch_kl_k3_mean"], expected["k3_kl"])
    close(metrics["off_policy_kl_k3_mean"], expected["k3_kl"])
    close(metrics["chi2_token"], expected["chi2_token"])
    close(metrics["chi2_seq"], expected["chi2_seq"])
    close(metrics["log_perplexity_gap_mean"], expected["log_ppl_diff"])
    trainer = -SEQUENCES.mean(FLAT["logp_proximal"])
    engine = -SEQUENCES.mean(FLAT["logp_behaviour"])
    gap = trainer - engine
    close(trainer.mean(), expected["training_log_ppl"])
    close(trainer.exp().mean(), expected["training_ppl"])
    close(engine.mean(), expected["rollout_log_ppl"])
    close(engine.exp().mean(), expected["rollout_ppl"])
    close(gap.exp().mean(), expected["ppl_ratio"])
    close(gap.abs().mean(), expected["log_ppl_abs_diff"])
    close(gap.max(), expected["log_ppl_diff_max"])
    close(gap.min(), expected["log_ppl_diff_min"])


def test_diagnostics_of_the_weights() -> None:
    expected = golden("diagnostics/importance_weights_token_2.0")["out"]
    metrics = sums(2.0).metrics()
    close(metrics["behaviour_weight_mean"], expected["rollout_is_mean"])
    close(metrics["effective_sample_size"], expected["rollout_is_eff_sample_size"])
    close(metrics["cap_fraction"], expected["rollout_is_ratio_fraction_high"])
    raw, applied, _ = behaviour_weights(
        WeightConfig(cap=2.0), PROXIMAL_TO_BEHAVIOUR, MASK, SEQUENCES
    )
    weights, per_sequence = applied[MASK], SEQUENCES.mean(applied)
    assert metrics["behaviour_weight_max"] == float(raw.max()) > 2.0
    close(weights.max(), expected["rollout_is_max"])
    close(raw[MASK].min(), expected["rollout_is_min"])
    close((raw[MASK] < 0.5).double().mean(), expected["rollout_is_ratio_fraction_low"])
    close(weights.std(correction=0), expected["rollout_is_std"])
    close(per_sequence.mean(), expected["rollout_is_seq_mean"])
    close(per_sequence.std(), expected["rollout_is_seq_std"])
    close(per_sequence.max(), expected["rollout_is_seq_max"])
    close(per_sequence.min(), expected["rollout_is_seq_min"])
    close((per_sequence - 1.0).abs().max(), expected["rollout_is_seq_max_deviation"])
    close((per_sequence > 2.0).double().mean(), expected["rollout_is_seq_fraction_high"])
    close((per_sequence < 0.5).double().mean(), expected["rollout_is_seq_fraction_low"])


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_kl(estimator: KlEstimator) -> None:
    ours = kl(estimator, FLAT["logp_current"] - FLAT["logp_reference"])
    theirs = torch.tensor(golden(f"kl/{estimator}")["out"]).reshape(-1)
    close(ours[MASK], theirs[MASK])


def test_value_clipped() -> None:
    case = golden("value/clipped")
    lengths = torch.tensor(CASES["advantage/gae_whitened"]["params"]["lens"])
    valid = torch.arange(SHAPE[1])[None, :] < lengths[:, None]
    old = MATRICES["values"]
    returns = torch.tensor(CASES["advantage/gae_whitened"]["out"]["returns"], dtype=torch.float64)
    loss = value_loss(
        old + 0.3 * old.sign(), old, returns, valid, case["params"]["cliprange_value"]
    )
    close(loss.sum() / valid.sum(), case["out"])


def test_every_case_is_tested() -> None:
    """Runs last in this file."""
    if not TESTED:
        pytest.skip("looks at what the tests before it did")
    assert sorted(TESTED) == sorted(CASES)
