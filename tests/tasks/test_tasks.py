"""Tasks are a function of seed and position; held-out problems never enter training."""

import itertools
import json

import pytest

from leeway.config import Config
from leeway.tasks import Sampler, open_source
from leeway.trajectory import Purpose, Task

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def config(task: dict | None = None, **sections) -> Config:
    default = {"reasoning_gym": {"dataset": "chain_sum", "args": ONE_DIGIT}, "heldout": 64}
    return Config.model_validate(
        {"model": {"path": "m"}, "task": default if task is None else task, **sections}
    )


def sampler(config: Config) -> Sampler:
    return Sampler(open_source(config), config)


@pytest.fixture(params=["reasoning_gym", "jsonl"])
def either(request, tmp_path) -> Config:
    """Both sources, with problem spaces small enough to repeat."""
    if request.param == "reasoning_gym":
        return config()
    path = tmp_path / "rows.jsonl"
    # Every prompt stands there twice.
    rows = [{"prompt": f"{i} + 1", "answer": i + 1} for i in range(100)] * 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config({"jsonl": path, "reward": "m:f", "heldout": 40})


def test_training_never_sees_a_held_out_problem(either):
    tasks = sampler(either)
    held = tasks.heldout("before")
    texts = {json.dumps(task.messages) for task in held}
    assert len(texts) == len(held) == either.task.heldout
    trained = {json.dumps(task.messages) for task in tasks.take(1500)}
    assert not texts & trained
    # And the rest of the problem space is trained on.
    assert len(trained) >= 60


def test_a_restored_sampler_goes_on_as_if_uninterrupted(either):
    whole = sampler(either).take(700)
    first = sampler(either)
    head = first.take(333)
    second = sampler(either)
    second.restore(json.loads(json.dumps(first.state())))
    assert head + second.take(367) == whole


def test_the_seed_alone_decides(either):
    other = either.model_copy(update={"run": either.run.model_copy(update={"seed": 1})})
    assert sampler(either).take(50) == sampler(either).take(50)
    assert sampler(either).heldout("x") == sampler(either).heldout("x")
    assert [t.messages for t in sampler(other).take(50)] != [
        t.messages for t in sampler(either).take(50)
    ]
    assert [t.messages for t in sampler(other).heldout("x")] != [
        t.messages for t in sampler(either).heldout("x")
    ]


def test_a_task_carries_what_the_configuration_says():
    settings = config(
        run={"name": "demo", "seed": 5},
        sampling={"group_size": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 3}
        | {"max_new_tokens": 12},
    )
    task = sampler(settings).task(17)
    assert task.task_id == "demo-00000017"
    assert task.sequence == 17
    assert task.group_size == 4
    assert task.purpose is Purpose.TRAIN
    assert (task.sampling.temperature, task.sampling.top_p) == (0.7, 0.9)
    assert (task.sampling.top_k, task.sampling.max_new_tokens) == (3, 12)
    assert set(task.columns) == {"question", "answer", "metadata", "source"}
    assert Task.from_wire(task.to_wire()).task_id == task.task_id


def test_ids_and_seeds_are_distinct(either):
    tasks = sampler(either)
    everything = tasks.take(200) + tasks.heldout("before")
    assert len({task.task_id for task in everything}) == len(everything)
    assert len({task.seed for task in everything}) == len(everything)


def test_streaming_release_makes_each_answer_a_group_of_its_own():
    alone = {"baseline": "none", "normalise": "batch"}
    changes = {
        "sampling": {"group_size": 3},
        "queue": {"group_release": "streaming"},
        "trainer": {"batch_groups": 4, "algorithm": {"advantage": alone}},
    }
    settings = config(**changes)
    whole, streamed = sampler(config()).take(4), sampler(settings).take(12)
    assert settings.queued_batch_groups == len(streamed)
    assert [task.group_size for task in streamed] == [1] * 12
    assert [task.messages for task in streamed[::3]] == [task.messages for task in whole]
    assert all(task.messages == streamed[n // 3 * 3].messages for n, task in enumerate(streamed))
    assert len({task.seed for task in streamed}) == len({task.task_id for task in streamed}) == 12


def test_evaluations_differ_by_their_phase_alone():
    tasks = sampler(config())
    before, after = tasks.heldout("before", samples=2), tasks.heldout("after", samples=2)
    assert before[3].task_id == "eval-before-0003"
    assert after[3].task_id == "eval-after-0003"
    assert {task.purpose for task in before} == {Purpose.EVAL}
    assert {task.group_size for task in before} == {2}
    for one, other in zip(before, after, strict=True):
        assert (one.seed, one.messages, one.columns) == (other.seed, other.messages, other.columns)


def test_the_system_prompt_comes_first():
    base = {"reasoning_gym": {"dataset": "chain_sum"}}
    assert [m["role"] for m in sampler(config(base)).task(0).messages] == ["user"]
    messages = sampler(config(base | {"system_prompt": ""})).task(0).messages
    assert messages[0] == {"role": "system", "content": ""}
    assert messages[1]["role"] == "user"


def test_worked_examples_come_between_system_prompt_and_question():
    examples = [{"user": "12 + 3 =", "assistant": "15"}, {"user": "9 - 9 =", "assistant": "0"}]
    base = {
        "reasoning_gym": {"dataset": "chain_sum"},
        "system_prompt": "Add.",
        "examples": examples,
    }
    task = sampler(config(base)).task(0)
    assert [m["role"] for m in task.messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert task.messages[2] == {"role": "assistant", "content": "15"}
    assert task.messages[-1]["content"] == task.columns["question"]


def test_training_order_has_no_period_of_a_chunk():
    tasks = sampler(config({"reasoning_gym": {"dataset": "chain_sum"}}))
    questions = [task.columns["question"] for task in tasks.take(1100)]
    assert len(set(questions)) > 1000


def test_datasets_that_draw_all_problems_when_built():
    task = {"reasoning_gym": {"dataset": "list_functions"}, "heldout": 3}
    positions = list(itertools.chain(range(3), range(498, 503)))
    one, other = sampler(config(task)), sampler(config(task))
    assert [one.task(i) for i in positions] == [other.task(i) for i in reversed(positions)][::-1]
