"""Every bad source says which field or line is wrong, what it holds, and what to do."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from leeway.config import Config, load
from leeway.errors import ConfigError, DataError
from leeway.tasks import JsonlSource, open_source

GOOD = {"prompt": "2 + 2", "answer": "4"}


def write(path: Path, *lines: object) -> Path:
    path.write_bytes(
        b"".join(
            (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            for line in lines
        )
    )
    return path


def distinct(count: int) -> list[dict]:
    return [{"prompt": f"{i} + 2", "answer": i + 2} for i in range(count)]


def jsonl(path: Path, **options) -> JsonlSource:
    settings = {"preamble": (), "heldout": 0, "batch": 1, "seed": 0} | options
    return JsonlSource(path, **settings)


def gym(dataset: str, heldout: int = 0, **args) -> None:
    task = {"reasoning_gym": {"dataset": dataset, "args": args}, "heldout": heldout}
    open_source(Config.model_validate({"model": {"path": "m"}, "task": task}))


# JSONL --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"prompt": "2 + 2", ',
            "not JSON: Expecting property name enclosed in double quotes: line 2 column 1 "
            "(char 21); write one JSON object a line",
        ),
        (
            b'{"prompt": "\xff"}',
            "not JSON: 'utf-8' codec can't decode byte 0xff in position 12: invalid start byte; "
            "write one JSON object a line",
        ),
        (["2 + 2"], '[\'2 + 2\'] is not an object; write {"prompt": "...", ...}'),
        (
            {"question": "2 + 2", "answer": "4"},
            "no `prompt` among ['answer', 'question']; add it (text or chat messages)",
        ),
        (
            {"prompt": 4},
            "prompt = 4: neither text nor chat messages; write a non-empty string or a list of "
            '{"role": "...", "content": "..."}',
        ),
        (
            {"prompt": [{"role": "user"}]},
            "prompt = [{'role': 'user'}]: neither text nor chat messages; write a non-empty string "
            'or a list of {"role": "...", "content": "..."}',
        ),
        (
            {"prompt": ""},
            "prompt = '': neither text nor chat messages; write a non-empty string or a list of "
            '{"role": "...", "content": "..."}',
        ),
    ],
)
def test_a_bad_row_is_named_counted_and_costs_nothing_else(tmp_path, line, message):
    path = write(tmp_path / "rows.jsonl", GOOD, line, b"", GOOD)
    counted = REGISTRY.get_sample_value("leeway_task_rows_skipped_total")
    source = jsonl(path)
    assert [str(fault) for fault in source.faults] == [f"{path}:2: {message}"]
    assert REGISTRY.get_sample_value("leeway_task_rows_skipped_total") == counted + 1
    assert [source.train(i).columns["answer"] for i in range(4)] == ["4"] * 4


def test_a_bad_row_ends_the_run_where_that_is_wanted(tmp_path):
    path = write(tmp_path / "rows.jsonl", GOOD, b"{", GOOD)
    task = {"jsonl": path, "reward": "m:f", "bad_rows": "stop"}
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not JSON"):
        open_source(Config.model_validate({"model": {"path": "m"}, "task": task}))


def test_a_file_without_a_usable_row(tmp_path):
    empty = write(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError) as raised:
        jsonl(empty)
    assert str(raised.value) == (
        f"task.jsonl = {str(empty)!r}: no usable row (0 unreadable); write one JSON object a line: "
        '{"prompt": "...", "answer": "..."}'
    )
    bad = write(tmp_path / "bad.jsonl", b"{", b"[]")
    with pytest.raises(ConfigError) as raised:
        jsonl(bad)
    assert "no usable row (2 unreadable)" in str(raised.value)
    assert f"First: {bad}:1: not JSON" in str(raised.value)


def test_a_missing_file(tmp_path):
    path = tmp_path / "missing.jsonl"
    with pytest.raises(ConfigError) as raised:
        jsonl(path)
    assert str(raised.value) == (
        f"task.jsonl = {str(path)!r}: cannot be read: No such file or directory; check the path"
    )


@pytest.mark.parametrize(("heldout", "batch"), [(8, 3), (11, 1), (0, 11)])
def test_fewer_rows_than_are_needed(tmp_path, heldout, batch):
    path = write(tmp_path / "rows.jsonl", *distinct(10))
    with pytest.raises(ConfigError) as raised:
        jsonl(path, heldout=heldout, batch=batch)
    assert str(raised.value) == (
        f"task.jsonl = {str(path)!r}: 10 usable rows with 10 different prompts, but task.heldout = "
        f"{heldout} and trainer.batch_groups = {batch} need {heldout + batch}; add rows, or lower "
        "one of the two"
    )


def test_just_enough_rows(tmp_path):
    source = jsonl(write(tmp_path / "rows.jsonl", *distinct(10)), heldout=7, batch=3)
    assert len({source.train(i).columns["prompt"] for i in range(3)}) == 3


def test_an_epoch_has_every_row_once_and_the_next_another_order(tmp_path):
    source = jsonl(write(tmp_path / "rows.jsonl", *distinct(50)))
    epochs = [[source.train(e * 50 + i).columns["prompt"] for i in range(50)] for e in range(2)]
    assert set(epochs[0]) == set(epochs[1])
    assert len(set(epochs[0])) == 50
    assert epochs[0] != epochs[1]


def test_chat_messages_and_their_own_system_prompt(tmp_path):
    user = {"role": "user", "content": "Hi"}
    own = {"role": "system", "content": "mine"}
    path = write(tmp_path / "rows.jsonl", {"prompt": [user]}, {"prompt": [own, user]})
    source = jsonl(path, preamble=({"role": "system", "content": "ours"},))
    systems = {source.train(i).messages[0]["content"] for i in range(2)}
    assert systems == {"mine", "ours"}
    assert all(len(source.train(i).messages) == 2 for i in range(2))


# reasoning-gym ------------------------------------------------------------------------------------


def test_an_unknown_dataset():
    with pytest.raises(ConfigError) as raised:
        gym("chain_sums")
    assert str(raised.value) == (
        "task.reasoning_gym.dataset = 'chain_sums': no such dataset; did you mean 'chain_sum'?"
    )


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"terms": 2}, "unexpected keyword argument 'terms'"),
        ({"min_terms": 0}, "min_terms must be positive"),
    ],
)
def test_options_that_the_dataset_refuses(args, reason):
    with pytest.raises(ConfigError) as raised:
        gym("chain_sum", **args)
    assert str(raised.value).startswith(
        f"task.reasoning_gym.args = {args!r}: chain_sum refuses them: "
    )
    assert reason in str(raised.value)
    assert str(raised.value).endswith("; see the dataset's options")


@pytest.mark.parametrize("name", ["seed", "size"])
def test_options_that_are_ours(name):
    with pytest.raises(ConfigError) as raised:
        gym("chain_sum", **{name: 7})
    assert str(raised.value) == (
        f"task.reasoning_gym.args.{name} = 7: the stream is endless and follows run.seed; leave it "
        "out"
    )


def test_more_held_out_problems_than_there_are():
    space = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    with pytest.raises(ConfigError) as raised:
        gym("chain_sum", heldout=201, **space)
    assert str(raised.value) == (
        "task.heldout = 201: task.reasoning_gym.dataset 'chain_sum' has only about 200 different "
        "problems with these args; lower it, or widen the dataset"
    )


def test_all_problems_held_out():
    with pytest.raises(ConfigError) as raised:
        gym("chain_sum", heldout=10, min_terms=1, max_terms=1, max_digits=1)
    assert str(raised.value) == (
        "task.heldout = 10: all 200 problems drawn for training are held out; lower it, or widen "
        "task.reasoning_gym.dataset 'chain_sum' with other args"
    )


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("nonsense", "write module:function"),
        ("/does/not/exist.py:keep", "FileNotFoundError"),
        ("{file}:absent", "AttributeError"),
        ("{file}:raises", "raised ValueError: why not on a row with the columns"),
    ],
)
def test_a_keep_function_that_does_not_work(tmp_path: Path, keep: str, message: str) -> None:
    file = tmp_path / "keep.py"
    file.write_text("def raises(**columns): raise ValueError('why not')\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    config = load(
        None,
        [
            "model.path=m",
            f"task.jsonl={rows}",
            "task.reward=r.py:reward",
            f"task.keep={keep.format(file=file)}",
        ],
        {},
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_source(config)


def test_rows_that_are_not_kept_are_neither_trained_on_nor_held_out(tmp_path: Path) -> None:
    file = tmp_path / "keep.py"
    file.write_text("def keep(answer, **columns): return not answer.startswith('-')\n")
    dataset = (
        "{dataset: chain_sum, args: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}"
    )
    config = load(
        None,
        [
            "model.path=m",
            f"task.reasoning_gym={dataset}",
            f"task.keep={file}:keep",
            "task.heldout=40",
        ],
        {},
    )
    source = open_source(config)
    rows = [*source.heldout(), *(source.train(position) for position in range(200))]
    assert not any(row.columns["answer"].startswith("-") for row in rows)
