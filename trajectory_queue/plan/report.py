"""The answers of `leeway plan` for people: tables in the terminal, plan.png and plan.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trajectory_queue.plan import questions
from trajectory_queue.plan.profile import Profile
from trajectory_queue.plan.questions import Answer, Bound


@dataclass(frozen=True, slots=True)
class Plan:
    """All answers about one profile; policies and modes are asked at the recommended budget."""

    profile: Profile
    bound: Bound
    budgets: Sequence[Answer]
    recommended: Answer
    splits: Sequence[Answer]
    policies: Sequence[Answer]
    modes: Sequence[Answer]

    @property
    def parts(self) -> Mapping[str, Sequence[Answer]]:
        return {
            "staleness budget (versions)": self.budgets,
            f"GPUs, rollouts : trainer, at eta = {self.eta}": self.splits,
            f"data over the budget, at eta = {self.eta}": self.policies,
            f"weights in flight, at eta = {self.eta}": self.modes,
        }

    @property
    def eta(self) -> int:
        return self.recommended.profile.budget


def ask(profile: Profile, *, steps: int, seed: int = 0) -> Plan:
    """Asks everything about a profile."""
    answers = questions.budgets(profile, questions.BUDGETS, steps=steps, seed=seed)
    recommended = questions.smallest_good(answers)
    at = recommended.profile
    return Plan(
        profile=profile,
        bound=questions.bound(profile),
        budgets=answers,
        recommended=recommended,
        splits=questions.splits(at, steps=steps, seed=seed),
        policies=questions.policies(at, steps=steps, seed=seed),
        modes=questions.update_modes(at, steps=steps, seed=seed),
    )


def show(plan: Plan, console: Console) -> None:
    profile = plan.profile
    console.print(f"[bold]{profile.name}[/bold]", highlight=False)
    if profile.source:
        console.print(profile.source.strip(), style="dim", highlight=False, markup=False)
    for title, answers in plan.parts.items():
        console.print(_table(title, answers))
    best, recommended = questions.best(plan.budgets), plan.recommended
    console.print(
        f"No budget can give more than {plan.bound.tokens_per_second:.4g} tokens/s: the trainer "
        f"alone {plan.bound.trainer:.4g}, the fleet alone {plan.bound.rollouts:.4g}.",
        highlight=False,
    )
    console.print(
        f"Smallest budget within {questions.TOLERANCE:.0%} of the best: "
        f"[bold]staleness.budget = {plan.eta}[/bold] "
        f"({recommended.outcome.tokens_per_second:.4g} tokens/s, staleness "
        f"{recommended.outcome.staleness_mean:.2f}; the best is "
        f"{best.outcome.tokens_per_second:.4g} at {best.setting}).",
        highlight=False,
    )
    console.print(
        f"Best split at that budget: {questions.best(plan.splits).setting} of {profile.gpus:g} "
        f"GPUs. A week of {profile.gpus:g} GPUs costs {recommended.week_price:,.0f}; it is "
        f"{recommended.outcome.steps_per_hour * 168:,.0f} steps.",
        highlight=False,
    )


def write(plan: Plan, directory: Path) -> None:
    """Writes plan.json and, where matplotlib is installed, plan.png."""
    directory.mkdir(parents=True, exist_ok=True)
    record = {
        "profile": plan.profile.model_dump(mode="json", exclude={"rollouts": {"answers"}}),
        "bound": {"trainer": plan.bound.trainer, "rollouts": plan.bound.rollouts},
        "recommended_budget": plan.eta,
        "answers": {
            title: [{"setting": a.setting, **a.outcome.row()} for a in answers]
            for title, answers in plan.parts.items()
        },
    }
    (directory / "plan.json").write_text(json.dumps(record, indent=2) + "\n")
    try:
        draw(plan, directory / "plan.png")
    except ImportError:
        print("plan.png needs matplotlib: pip install 'leeway[quickstart]'")


def draw(plan: Plan, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), layout="constrained")
    figure.suptitle(f"leeway plan: {plan.profile.name}, {plan.profile.gpus:g} GPUs")
    (speed, idle, stale), (lost, split, policy) = axes
    etas = [answer.profile.budget for answer in plan.budgets]
    outcomes = [answer.outcome for answer in plan.budgets]
    places = range(len(etas))

    speed.plot(places, [o.tokens_per_second for o in outcomes], "o-", color="tab:blue")
    speed.axhline(plan.bound.tokens_per_second, ls=":", color="gray", label="bound")
    speed.axvline(etas.index(plan.eta), ls="--", color="tab:green", label=f"eta = {plan.eta}")
    speed.set(title="throughput (trained tokens/s)", ylim=(0, None))
    speed.legend()
    idle.plot(places, [1 - o.trainer_busy for o in outcomes], "o-", label="trainer")
    idle.plot(places, [1 - o.slots_busy for o in outcomes], "o-", label="rollout slots")
    idle.set(title="idle share of the time", ylim=(-0.02, 1.02))
    idle.legend()
    _stack(stale, [o.staleness_tokens for o in outcomes], places)
    stale.set(title="trained tokens by staleness")
    lost.plot(places, [o.masked_share for o in outcomes], "o-", label="masked")
    lost.plot(places, [o.dropped_share for o in outcomes], "o-", label="dropped")
    lost.set(title=f"tokens over the budget, of generated ({plan.profile.over_budget})")
    lost.set_ylim(-0.005, max(0.05, *(o.masked_share + o.dropped_share for o in outcomes)))
    lost.legend()
    for axis in (speed, idle, stale, lost):
        axis.set_xticks(places, etas)
        axis.set_xlabel("staleness budget (versions)")
    _bars(split, plan.splits, "throughput by GPUs, rollouts : trainer")
    _bars(policy, [*plan.policies, *plan.modes], f"throughput at eta = {plan.eta}")
    for axis in axes.flat:
        axis.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _stack(axis: Any, shares: Sequence[Sequence[float]], places: Sequence[int]) -> None:
    from matplotlib import colormaps

    longest = max(len(share) for share in shares)
    below = [0.0] * len(shares)
    for version in range(longest):
        heights = [share[version] if version < len(share) else 0.0 for share in shares]
        color = colormaps["viridis"](version / max(longest - 1, 1))
        axis.bar(places, heights, bottom=below, color=color, label=str(version))
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axis.legend(title="versions", fontsize="x-small", ncols=2)


def _bars(axis: Any, answers: Sequence[Answer], title: str) -> None:
    places = range(len(answers))
    axis.bar(places, [answer.outcome.tokens_per_second for answer in answers], color="tab:blue")
    axis.set_xticks(places, [answer.setting for answer in answers], rotation=30, ha="right")
    axis.set(title=title)


def _table(title: str, answers: Sequence[Answer]) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    names = ("", "tokens/s", "steps/h", "trainer idle", "slots idle")
    for name in (*names, "staleness", "max", "masked", "dropped", "price/1000"):
        table.add_column(name, justify="right", no_wrap=True)
    for answer in answers:
        o = answer.outcome
        table.add_row(
            answer.setting,
            f"{o.tokens_per_second:,.0f}",
            f"{o.steps_per_hour:.4g}",
            f"{max(0.0, 1 - o.trainer_busy):.1%}",
            f"{1 - o.slots_busy:.1%}",
            f"{o.staleness_mean:.2f}",
            str(o.staleness_max),
            f"{o.masked_share:.1%}",
            f"{o.dropped_share:.1%}",
            f"{answer.price_of_1000_steps:,.0f}",
        )
    return table
