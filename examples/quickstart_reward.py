"""What the quickstart learns from: which problems, and what an answer to one is worth."""

import re


def keep(answer: str, **columns: object) -> bool:
    """Negative results are beyond a model of this size: it never finds one to learn from."""
    return not answer.startswith("-")


def reward(completion: str, answer: str) -> float:
    """1 when the last number of the completion is right, otherwise 0."""
    numbers = re.findall(r"-?\d+", completion)
    return float(numbers[-1:] == [answer])
