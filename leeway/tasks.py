"""Where tasks come from: data sources, and the sampler that walks them.

A `TaskSource` answers two questions: which row stands at a position of the training order, and
which rows are held out. Both are functions of the run's seed and nothing else, so that a resumed
run needs only its position to go on as if it had not been interrupted.

What must hold: no problem is both trained on and held out. The held-out rows are chosen first;
every training row is compared with them by its text, since small problem spaces repeat.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import structlog
import xxhash
from prometheus_client import Counter

from leeway.config import Config, ReasoningGymConfig, TaskConfig
from leeway.errors import ConfigError, DataError
from leeway.functions import load_function
from leeway.trajectory import Purpose, Sampling, Task

log = structlog.get_logger(__name__)

ROWS_SKIPPED = Counter(
    "leeway_task_rows_skipped_total", "Rows of task.jsonl that could not be read and were left out"
)

Message = Mapping[str, Any]
Messages = tuple[Message, ...]

# Some datasets draw all their problems when built: they are asked for this many at a time.
_CHUNK = 500
# So many draws in a row without a new problem: the problem space is taken as exhausted.
_PATIENCE = 1000
# So many draws in a row that are all held out: nothing is taken to be left for training.
_REDRAWS = 200
# Of unreadable rows so many are reported one by one.
_ROWS_REPORTED = 10


@dataclass(frozen=True, slots=True)
class Row:
    """One problem: the prompt as chat messages, and the columns that reach the reward function."""

    messages: Messages
    columns: Mapping[str, Any]


class TaskSource(Protocol):
    """Rows by position; deterministic by the run's seed."""

    def train(self, position: int) -> Row:
        """The row at `position` (from 0) of an endless training order; never a held-out one."""
        ...

    def heldout(self) -> Sequence[Row]:
        """The `task.heldout` rows that training never sees, distinct."""
        ...


def open_source(config: Config) -> TaskSource:
    """The source that `task` names.

    Raises:
        ConfigError: it cannot be opened, or has too few rows for held-out rows and a batch.
        DataError: an unreadable row, with `task.bad_rows = stop`.
    """
    preamble = _preamble(config.task)
    keep = _keep(config.task.keep)
    if config.task.reasoning_gym is not None:
        return ReasoningGymSource(
            config.task.reasoning_gym,
            preamble=preamble,
            heldout=config.task.heldout,
            seed=config.run.seed,
            keep=keep,
        )
    assert config.task.jsonl is not None  # TaskConfig: exactly one source
    return JsonlSource(
        config.task.jsonl,
        preamble=preamble,
        heldout=config.task.heldout,
        batch=config.trainer.batch_groups,
        seed=config.run.seed,
        stop_at_bad_row=config.task.bad_rows == "stop",
        keep=keep,
    )


def _keep(spec: str | None) -> Callable[[Row], bool]:
    if spec is None:
        return lambda row: True
    function = load_function(spec, "task.keep")

    def keep(row: Row) -> bool:
        try:
            return bool(function(**row.columns))
        except Exception as error:
            # The boundary to the user's code.
            raise ConfigError(
                f"task.keep = {spec!r}: raised {type(error).__name__}: {error} on a row with the "
                f"columns {sorted(row.columns)}; write `def keep(answer, **columns) -> bool`"
            ) from error

    return keep


class Sampler:
    """Turns positions into tasks; its whole state is its position."""

    def __init__(self, source: TaskSource, config: Config) -> None:
        self._source = source
        self._run = config.run
        self._group_size = config.queued_group_size
        self._groups_per_row = config.sampling.group_size // self._group_size
        self._sampling = Sampling(
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            max_new_tokens=config.sampling.max_new_tokens,
        )
        self._position = 0

    def task(self, sequence: int) -> Task:
        """The training task at a position: the same whenever it is asked for."""
        row = self._source.train(sequence // self._groups_per_row)
        return Task(
            task_id=f"{self._run.name}-{sequence:08d}",
            sequence=sequence,
            messages=row.messages,
            columns=row.columns,
            group_size=self._group_size,
            sampling=self._sampling,
            seed=_hash(self._run.seed, "train", sequence),
        )

    def take(self, count: int) -> list[Task]:
        """The next `count` training tasks; moves the position behind them."""
        first = self._position
        self._position += count
        return [self.task(sequence) for sequence in range(first, self._position)]

    def heldout(self, phase: str, min_version: int = 0, samples: int = 1) -> list[Task]:
        """The held-out problems as evaluation tasks.

        Args:
            phase: Becomes part of the ids ("before": eval-before-0003). The seeds do not depend on
                it: two phases differ by their policies alone.
            min_version: Of the policy that is judged; older ones may not answer.
            samples: Answers drawn to each problem.
        """
        return [
            Task(
                task_id=f"eval-{phase}-{index:04d}",
                sequence=index,
                messages=row.messages,
                columns=row.columns,
                group_size=samples,
                sampling=self._sampling,
                seed=_hash(self._run.seed, "heldout", index),
                purpose=Purpose.EVAL,
                min_version=min_version,
            )
            for index, row in enumerate(self._source.heldout())
        ]

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"position": self._position}

    def restore(self, state: Mapping[str, int]) -> None:
        self._position = state["position"]


class ReasoningGymSource:
    """An endless stream of problems that a `reasoning-gym` dataset generates.

    Columns: `question`, `answer` and `metadata`, as in the dataset's entries, and `source`, from
    which `reasoning_gym.create_dataset` makes the same entry again: {dataset, options, index}.
    """

    def __init__(
        self,
        config: ReasoningGymConfig,
        *,
        preamble: Messages,
        heldout: int,
        seed: int,
        keep: Callable[[Row], bool] = lambda row: True,
    ) -> None:
        self._config = config
        self._preamble = preamble
        self._seed = seed
        self._keep = keep
        self._opened = lru_cache(maxsize=16)(self._open)
        self._heldout = self._choose(heldout)
        self._heldout_questions = {row.columns["question"] for row in self._heldout}
        self.train(0)

    def train(self, position: int) -> Row:
        chunk, index = divmod(position, _CHUNK)
        for attempt in range(_REDRAWS):
            row = self._row(f"train/{chunk}/{attempt}", index)
            if row.columns["question"] not in self._heldout_questions and self._keep(row):
                return row
        raise ConfigError(
            f"task.heldout = {len(self._heldout)}: all {_REDRAWS} problems drawn for training are "
            f"held out; lower it, or widen {self._name} with other args"
        )

    def heldout(self) -> Sequence[Row]:
        return self._heldout

    def _choose(self, count: int) -> tuple[Row, ...]:
        chosen: dict[str, Row] = {}
        draw = last_new = 0
        while len(chosen) < count:
            chunk, index = divmod(draw, _CHUNK)
            row = self._row(f"heldout/{chunk}", index)
            if row.columns["question"] not in chosen and self._keep(row):
                chosen[row.columns["question"]] = row
                last_new = draw
            elif draw - last_new >= _PATIENCE:
                raise ConfigError(
                    f"task.heldout = {count}: {self._name} has only about {len(chosen)} different "
                    "problems with these args; lower it, or widen the dataset"
                )
            draw += 1
        return tuple(chosen.values())

    @property
    def _name(self) -> str:
        return f"task.reasoning_gym.dataset {self._config.dataset!r}"

    def _row(self, stream: str, index: int) -> Row:
        dataset, options = self._opened(stream)
        entry = dataset[index]
        columns = {name: entry[name] for name in ("question", "answer", "metadata")}
        columns["source"] = {
            "dataset": self._config.dataset,
            "options": options,
            "index": index,
        }
        return Row((*self._preamble, _turn("user", entry["question"])), columns)

    def _open(self, stream: str) -> tuple[Any, dict[str, Any]]:
        """One chunk of a stream of problems, and the options that make it."""
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError(
                f"{self._name}: reasoning-gym is not installed; `pip install reasoning-gym`"
            ) from error
        name, args = self._config.dataset, self._config.args
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see reasoning-gym's gallery"
            raise ConfigError(f"task.reasoning_gym.dataset = {name!r}: no such dataset; {hint}")
        for ours in ("seed", "size"):
            if ours in args:
                raise ConfigError(
                    f"task.reasoning_gym.args.{ours} = {args[ours]!r}: the stream is endless and "
                    "follows run.seed; leave it out"
                )
        # Datasets seed problem i with seed + i, and some take no more than 32 bits.
        options = {**args, "seed": _hash(self._seed, stream) >> 33, "size": _CHUNK}
        try:
            return reasoning_gym.create_dataset(name, **options), options
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"task.reasoning_gym.args = {args!r}: {name} refuses them: {error}; see the "
                "dataset's options"
            ) from error


class JsonlSource:
    """Rows of a file, one JSON object a line, kept in memory and shuffled anew every epoch.

    `prompt` is text or a list of chat messages; all other keys are columns, and the text of the
    prompt is one as well. A row with a system message of its own gets no preamble.

    Attributes:
        faults: One error for every row that could not be read, with file, line and remedy.
    """

    def __init__(
        self,
        path: Path,
        *,
        preamble: Messages,
        heldout: int,
        batch: int,
        seed: int,
        stop_at_bad_row: bool = False,
        keep: Callable[[Row], bool] = lambda row: True,
    ) -> None:
        self._seed = seed
        rows, self.faults = _read(path, preamble)
        self._report(path, stop_at_bad_row)
        rows = [row for row in rows if keep(row)]
        if not rows:
            raise ConfigError(
                f"task.jsonl = {str(path)!r}: no usable row ({len(self.faults)} unreadable); "
                'write one JSON object a line: {"prompt": "...", "answer": "..."}'
                + (f". First: {self.faults[0]}" if self.faults else "")
            )
        order = _shuffled(len(rows), _hash(seed, "heldout"))
        problems = {_text(rows[index]): rows[index] for index in order}
        self._heldout = tuple(problems.values())[:heldout]
        held = {_text(row) for row in self._heldout}
        self._train = [row for row in rows if _text(row) not in held]
        if len(self._heldout) < heldout or len(self._train) < batch:
            raise ConfigError(
                f"task.jsonl = {str(path)!r}: {len(rows)} usable rows with {len(problems)} "
                f"different prompts, but task.heldout = {heldout} and trainer.batch_groups = "
                f"{batch} need {heldout + batch}; add rows, or lower one of the two"
            )
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def train(self, position: int) -> Row:
        epoch, index = divmod(position, len(self._train))
        return self._train[self._order(epoch)[index]]

    def heldout(self) -> Sequence[Row]:
        return self._heldout

    def _epoch_order(self, epoch: int) -> list[int]:
        return _shuffled(len(self._train), _hash(self._seed, "epoch", epoch))

    def _report(self, path: Path, stop: bool) -> None:
        if stop and self.faults:
            raise self.faults[0]
        ROWS_SKIPPED.inc(len(self.faults))
        for fault in self.faults[:_ROWS_REPORTED]:
            log.warning("row skipped", reason=str(fault))
        if self.faults:
            log.warning("rows skipped", file=str(path), rows=len(self.faults))


def _read(path: Path, preamble: Messages) -> tuple[list[Row], list[DataError]]:
    rows: list[Row] = []
    faults: list[DataError] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    rows.append(_parse(line, preamble))
                except ValueError as error:
                    faults.append(DataError(f"{path}:{number}: {error}"))
    except OSError as error:
        raise ConfigError(
            f"task.jsonl = {str(path)!r}: cannot be read: {error.strerror}; check the path"
        ) from error
    return rows, faults


def _parse(line: bytes, preamble: Messages) -> Row:
    """Raises `ValueError` saying what is wrong with the line, and what to write instead."""
    try:
        columns = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}; write one JSON object a line") from error
    if not isinstance(columns, dict):
        raise ValueError(f'{columns!r:.80} is not an object; write {{"prompt": "...", ...}}')
    if "prompt" not in columns:
        raise ValueError(f"no `prompt` among {sorted(columns)}; add it (text or chat messages)")
    prompt = columns["prompt"]
    if isinstance(prompt, str) and prompt:
        return Row((*preamble, _turn("user", prompt)), columns)
    if not (isinstance(prompt, list) and prompt and all(map(_is_message, prompt))):
        raise ValueError(
            f"prompt = {prompt!r:.80}: neither text nor chat messages; write a non-empty string or "
            'a list of {"role": "...", "content": "..."}'
        )
    messages = tuple(prompt)
    return Row(messages if messages[0]["role"] == "system" else (*preamble, *messages), columns)


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def _preamble(config: TaskConfig) -> Messages:
    """What comes before every prompt: the system prompt, then the worked examples."""
    turns = [] if config.system_prompt is None else [_turn("system", config.system_prompt)]
    for example in config.examples:
        turns += [_turn("user", example.user), _turn("assistant", example.assistant)]
    return tuple(turns)


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _text(row: Row) -> str:
    """What makes two rows the same problem."""
    return json.dumps(row.messages, sort_keys=True)


def _shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def _hash(seed: int, *parts: object) -> int:
    """64 bits that depend on all parts: neighbouring seeds and positions share nothing."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, (seed, *parts))).encode())
