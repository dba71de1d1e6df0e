"""The simulator keeps the queue's promises, and its results are those that arithmetic demands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.config import OverBudget, UpdateMode
from leeway.errors import ConfigError
from trajectory_queue.plan import profile as profiles
from trajectory_queue.plan.command import changed
from trajectory_queue.plan.profile import LogNormal, Profile, Rollouts, Trainer
from trajectory_queue.plan.questions import Answer, best, bound, smallest_good, splits
from trajectory_queue.plan.simulation import Simulation, simulate


def steady(**values: object) -> Profile:
    """Every answer takes 10 s, a step 4 s; 8 groups of 2 fit the fleet at once."""
    profile = Profile(
        group_size=2,
        batch_groups=4,
        rollouts=Rollouts(
            nodes=2, concurrency=8, answer_tokens=LogNormal(median=100.0), token_seconds=0.1
        ),
        trainer=Trainer(fixed_seconds=4.0),
    )
    return profile.where(**values)


def test_a_synchronous_step_generates_and_then_trains() -> None:
    outcome = simulate(steady(budget=0), steps=5)
    assert outcome.seconds / outcome.steps == pytest.approx(14.0, abs=0.01)
    assert outcome.staleness_max == 0


def test_one_version_of_leeway_hides_the_shorter_side() -> None:
    """Two batches fit the fleet: one trains (4 s) while the other two are generated in 10 s."""
    outcome = simulate(steady(budget=2), steps=10)
    assert outcome.seconds / outcome.steps == pytest.approx(5.0, abs=0.1)
    assert outcome.tokens_per_second == pytest.approx(bound(steady()).rollouts, rel=0.02)


def test_decoding_slows_with_its_batch() -> None:
    """Eight sequences on a node, each slowed by the seven others by a tenth of its time."""
    outcome = simulate(steady(budget=0, **{"rollouts.nodes": 1, "rollouts.slowdown": 0.1}), steps=3)
    assert outcome.seconds / outcome.steps == pytest.approx(10.0 * 1.7 + 4.0, abs=0.01)


def test_tools_and_prompts_take_their_time_beside_decoding() -> None:
    profile = steady(
        budget=0,
        **{
            "rollouts.prompt_seconds": 1.0,
            "rollouts.tool_calls": 2,
            "rollouts.tool_seconds": {"median": 3.0},
        },
    )
    outcome = simulate(profile, steps=3)
    assert outcome.seconds / outcome.steps == pytest.approx(10.0 + 1.0 + 2 * 3.0 + 4.0, abs=0.01)


@pytest.mark.parametrize(("mode", "versions"), [(UpdateMode.IN_PLACE, 2), (UpdateMode.DRAIN, 1)])
def test_only_a_draining_node_keeps_its_weights(mode: UpdateMode, versions: int) -> None:
    most = 0

    class Watched(Simulation):
        def _completed(self, task_id: str, group: object) -> None:
            nonlocal most
            most = max(most, *(len(of) for of in group.done.values()))  # type: ignore[attr-defined]
            super()._completed(task_id, group)  # type: ignore[arg-type]

    Watched(steady(budget=3, **{"rollouts.update_mode": mode})).run(12, 2)
    assert (most >= versions) if versions > 1 else most == 1


def test_a_node_that_dies_costs_time_and_no_task() -> None:
    well = simulate(steady(), steps=40)
    failing = simulate(
        steady(
            lease_seconds=5.0,
            **{"rollouts.hours_between_failures": 0.02, "rollouts.restart_seconds": 10.0},
        ),
        steps=40,
    )
    assert failing.steps == 40
    assert 0.3 < failing.tokens_per_second / well.tokens_per_second < 0.95


@settings(max_examples=40, deadline=None)
@given(
    budget=st.integers(0, 4),
    policy=st.sampled_from(OverBudget),
    mode=st.sampled_from(UpdateMode),
    streaming=st.booleans(),
    sigma=st.floats(0.0, 1.5),
    step=st.floats(0.5, 20.0),
    failures=st.floats(0.0, 0.2),
    silent=st.floats(0.0, 0.5),
    seed=st.integers(0, 99),
)
def test_no_setting_trains_over_the_budget_or_beats_the_bound(
    budget: int,
    policy: OverBudget,
    mode: UpdateMode,
    streaming: bool,
    sigma: float,
    step: float,
    failures: float,
    silent: float,
    seed: int,
) -> None:
    profile = steady(
        budget=budget,
        over_budget=policy,
        streaming=streaming,
        patience_seconds=5.0,
        **{
            "rollouts.answer_tokens": {"median": 50.0, "sigma": sigma, "longest": 400.0},
            "rollouts.update_mode": mode,
            "rollouts.failure_share": failures,
            "rollouts.no_signal_share": 0.0 if streaming else silent,
            "trainer.fixed_seconds": step,
        },
    )
    outcome = simulate(profile, steps=6, seed=seed)
    if policy is not OverBudget.KEEP:
        assert outcome.staleness_max <= budget
    assert sum(outcome.staleness_tokens) == pytest.approx(1.0)
    assert outcome.trainer_busy <= 1.0 + 1e-6
    assert outcome.rollout_busy <= 1.0 + 1e-6
    again = simulate(profile, steps=6, seed=seed)
    assert again == outcome


def test_the_published_curve_is_reproduced() -> None:
    """AReaL's throughput at eta 0 and 1 (k tokens/s), from its lengths and step time alone."""
    areal = profiles.load("areal-math-1.5b")
    measured = {0: 128.7e3, 1: 269.3e3}
    for eta, tokens in measured.items():
        outcome = simulate(areal.where(budget=eta), steps=3)
        assert outcome.tokens_per_second == pytest.approx(tokens, rel=0.08)


def test_the_smallest_budget_near_the_best_is_recommended() -> None:
    answers = [
        Answer(str(eta), steady(budget=eta), simulate(steady(budget=eta), steps=8))
        for eta in (0, 1, 2, 4)
    ]
    assert smallest_good(answers).profile.budget == 2


def test_gpus_are_divided_more_finely_around_the_best_split() -> None:
    """20 nodes generate as fast as 44 GPUs train; the whole range alone is tried in steps of 8."""
    profile = steady(
        batch_groups=40,
        budget=4,
        **{
            "rollouts.nodes": 32,
            "trainer.gpus": 32,
            "trainer.fixed_seconds": 0.0,
            "trainer.token_seconds": 44 / 1600,
        },
    )
    answers = splits(profile, steps=6)
    nodes = [answer.profile.rollouts.nodes for answer in answers]
    assert nodes == sorted(set(nodes)) and (nodes[0], nodes[-1]) == (1, 63)
    chosen = best(answers).profile
    assert (chosen.rollouts.nodes, chosen.trainer.gpus) == (20, 44)


@pytest.mark.parametrize(
    ("override", "message"),
    [("rollouts.node=3", "known"), ("budget=-1", "budget = -1"), ("budget", "key=value")],
)
def test_a_wrong_value_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(steady(), [override])


@pytest.mark.parametrize("name", profiles.published())
def test_a_published_profile_says_where_it_is_from(name: str) -> None:
    assert "arXiv" in profiles.load(name).source
