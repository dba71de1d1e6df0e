"""Reward functions that come with Leeway; they are called like a user's own.

`task.reward: rollout_service.rewards.builtin:math_verify` names one; `reasoning_gym` is what scores
a reasoning-gym source by default.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

_NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
# What scorers raise on text that they cannot parse.
_PARSE_ERRORS = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)


def reasoning_gym(completion: str, *, source: dict[str, Any]) -> float:
    """What the dataset's own scorer says to the answer in the completion.

    Args:
        source: Where the problem comes from (`dataset`, `options`, `index`); it is generated again
            here, since entries do not survive JSON (tuples, integer keys).

    Some scorers raise on text that they cannot parse. That counts as 0, but only after the scorer
    has taken the entry's reference answer: one that raises on that as well is broken, and says so.
    """
    dataset = _dataset(source["dataset"], json.dumps(source["options"], sort_keys=True))
    entry = dataset[source["index"]]
    answer = extract_answer(completion, numeric=_is_number(entry["answer"]))
    try:
        return float(dataset.score_answer(answer, entry))
    except _PARSE_ERRORS:
        dataset.score_answer(entry["answer"], entry)
        return 0.0


def math_verify(completion: str, *, answer: str) -> float:
    """1 when the completion's answer equals the reference as mathematics, otherwise 0."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    return float(verify(parse(str(answer)), parse(completion)))


def extract_answer(completion: str, *, numeric: bool) -> str:
    """The answer in a completion.

    The last <answer> tag, or the last \\boxed{}; without one, the last number where the reference
    is a number (commas between thousands are left out), and otherwise the whole text.
    """
    for pattern in (_TAGGED, _BOXED):
        if marked := pattern.findall(completion):
            return str(marked[-1]).strip()
    if numeric and (numbers := _NUMBER.findall(completion)):
        return str(numbers[-1]).replace(",", "")
    return completion.strip()


def _is_number(answer: object) -> bool:
    return _NUMBER.fullmatch(str(answer)) is not None


@lru_cache(maxsize=16)
def _dataset(name: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(options))
