"""Reward functions and an environment that ask judges, for the tests."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor


def plain(completion, grader):
    """The length of what the judge says."""
    return len(grader(completion, max_tokens=8))


def echo(completion, grader):
    return float(grader([{"role": "user", "content": completion}]))


def many(completion, grader):
    return sum(map(float, grader.ask_all(["1", "2", "3", "4"])))


def threads(completion, grader):
    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(lambda text: float(grader(text)), ["1", "2", "3", "4"]))


def swallows(completion, grader):
    try:
        return float(grader(completion))
    except:  # noqa: E722
        return 0.0


def handles_refusals(completion, grader):
    from rollout_service.sandbox.judge import JudgeRefusedError

    try:
        return float(grader(completion))
    except JudgeRefusedError:
        return -1.0


def routes(completion, grader):
    return grader.post("/score", text=completion)["score"]


def slow_itself(completion, grader):
    grader("1")
    time.sleep(60)


def asks_for_ever(completion, grader):
    while True:
        grader("1")


def surroundings(completion, grader):
    """1 where nothing that it can see holds the key."""
    return float("judge-key" not in json.dumps(dict(os.environ)) + repr(vars(grader)))


def no_parameter(completion, answer):
    return 1.0


class Debate:
    def reset(self, grader, topic=""):
        self.grader = grader

    def consult(self, question: str) -> str:
        """Asks the judge."""
        return self.grader(question)

    def score(self, completion):
        return float(self.grader(completion))
