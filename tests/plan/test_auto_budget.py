"""`staleness.budget: auto`: its decisions, and what they are worth on six scenarios."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.config import AutoBudgetConfig
from trajectory_queue.autobudget import BudgetController, Decision, Observation
from trajectory_queue.plan.outcome import Step
from trajectory_queue.plan.profile import LogNormal, Profile, Rollouts, Trainer
from trajectory_queue.plan.simulation import Simulation, simulate

LIMITS = AutoBudgetConfig(lowest=1, highest=12)
HEALTHY = {"effective_sample_size": 0.95, "chi2_token": 0.05, "clip_fraction": 0.05}
SICK = {**HEALTHY, "effective_sample_size": 0.3}


def played(
    controller: BudgetController, budget: int, steps: int, **seen: object
) -> list[Decision | None]:
    decisions = []
    for _ in range(steps):
        observation = {"waiting_share": 0.0, "at_budget": True, "health": HEALTHY, **seen}
        decision = controller.decide(Observation(budget=budget, **observation))  # type: ignore[arg-type]
        budget = decision.budget if decision is not None else budget
        decisions.append(decision)
    return decisions


def test_it_widens_while_both_sides_wait_and_stops_at_the_limit() -> None:
    decisions = [d for d in played(BudgetController(LIMITS), 1, 200, waiting_share=0.3) if d]
    assert [d.budget for d in decisions] == list(range(2, 13))
    assert all("wait" in d.reason for d in decisions)


@pytest.mark.parametrize("seen", [{"waiting_share": 0.0}, {"at_budget": False}])
def test_a_wait_that_the_budget_does_not_cause_changes_nothing(seen: dict[str, object]) -> None:
    assert not any(played(BudgetController(LIMITS), 2, 50, **{"waiting_share": 0.5, **seen}))


def test_it_halves_at_once_and_says_which_bound() -> None:
    decisions = [d for d in played(BudgetController(LIMITS), 12, 5, health=SICK) if d]
    assert [d.budget for d in decisions] == [6, 3, 1]
    assert "effective_sample_size 0.30 below 0.50" in decisions[0].reason


def test_an_unhealthy_budget_stays_closed_for_a_while() -> None:
    controller = BudgetController(LIMITS)
    assert played(controller, 4, 1, health=SICK)[0] == Decision(
        2, "effective_sample_size 0.30 below 0.50"
    )
    later = played(controller, 2, LIMITS.forget_steps - 1, waiting_share=0.5)
    assert [d.budget for d in later if d] == [3]


@settings(deadline=None)
@given(
    st.integers(0, 20),
    st.lists(
        st.tuples(st.floats(0.0, 1.0), st.booleans(), st.floats(0.0, 1.0), st.floats(0.0, 5.0))
    ),
)
def test_it_stays_within_its_limits_and_moves_one_way_for_one_reason(
    budget: int, steps: list[tuple[float, bool, float, float]]
) -> None:
    controller = BudgetController(LIMITS)
    for waiting, at_budget, size, chi2 in steps:
        health = {"effective_sample_size": size, "chi2_token": chi2}
        decision = controller.decide(Observation(budget, waiting, at_budget, health))
        if decision is None:
            continue
        assert LIMITS.lowest <= decision.budget <= LIMITS.highest or decision.budget < budget
        sick = size < 0.5 or chi2 > 1.0
        assert decision.budget < budget if sick else decision.budget <= max(budget + 1, 1)
        assert decision.reason
        budget = decision.budget


BASE = Profile(
    group_size=4,
    batch_groups=16,
    rollouts=Rollouts(
        nodes=8,
        concurrency=32,
        answer_tokens=LogNormal(median=100.0, sigma=0.9, longest=800.0),
        token_seconds=0.1,
    ),
    trainer=Trainer(fixed_seconds=2.0, token_seconds=0.001),
)


def staleness_of(step: Step) -> float:
    ages = range(step.staleness.size)
    return float(sum(age * n for age, n in zip(ages, step.staleness, strict=True))) / step.tokens


class Tuned:
    """Runs the controller in virtual time; `drift`: how much a version changes the policy."""

    def __init__(self, drift: float = 0.02) -> None:
        self._controller = BudgetController(LIMITS)
        self._drift = drift
        self.outside = self.longest_outside = 0

    def __call__(self, simulation: Simulation, step: Step) -> None:
        size = math.exp(-self._drift * staleness_of(step) ** 2)
        self.outside = self.outside + 1 if size < LIMITS.lowest_sample_size else 0
        self.longest_outside = max(self.longest_outside, self.outside)
        share = step.waited_seconds / (step.waited_seconds + step.learned_seconds)
        decision = self._controller.decide(
            Observation(simulation.budget, share, step.at_budget, {"effective_sample_size": size})
        )
        if decision is not None:
            simulation.set_budget(decision.budget)


SCENARIOS: dict[str, tuple[Profile, float]] = {
    "steady": (BASE, 0.005),
    "drifting lengths": (BASE.where(**{"rollouts.growth": 0.004}), 0.005),
    "node losses": (
        BASE.where(
            lease_seconds=10.0,
            **{"rollouts.hours_between_failures": 0.3, "rollouts.restart_seconds": 30.0},
        ),
        0.005,
    ),
    "slow trainer": (BASE.where(**{"trainer.fixed_seconds": 40.0}), 0.005),
    "bursts of tools": (
        BASE.where(
            **{"rollouts.tool_calls": 2, "rollouts.tool_seconds": {"median": 5, "sigma": 1.2}}
        ),
        0.005,
    ),
    "unstable learning": (BASE, 0.1),
}
WARMUP, STEPS = 80, 80
EXPECTED_LOSS = 0.03


def healthy(drift: float) -> Callable[[float], bool]:
    return lambda staleness: math.exp(-drift * staleness**2) >= LIMITS.lowest_sample_size


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_is_as_fast_as_the_best_fixed_budget_that_stays_healthy(name: str) -> None:
    profile, drift = SCENARIOS[name]
    fine = healthy(drift)
    fixed = [
        simulate(profile.where(budget=eta), steps=STEPS, warmup=WARMUP)
        for eta in (1, 2, 3, 4, 6, 8, 12)
    ]
    best = max(o.tokens_per_second for o in fixed if fine(o.staleness_mean))
    tuned = Tuned(drift)
    outcome = simulate(
        profile.where(budget=LIMITS.lowest), steps=STEPS, warmup=WARMUP, on_step=tuned
    )
    print(f"{name}: {outcome.tokens_per_second / best:.3f} of the best, {tuned.longest_outside=}")
    assert outcome.tokens_per_second >= (1.0 - EXPECTED_LOSS) * best
    assert tuned.longest_outside <= 5
