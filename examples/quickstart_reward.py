"""What the quickstart learns from: 1 when the last number of the answer is right, otherwise 0."""

import re


def reward(completion: str, answer: str) -> float:
    numbers = re.findall(r"-?\d+", completion)
    return float(numbers[-1:] == [answer])
