"""Reward functions, good and bad, for the tests."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


def good(completion, answer):
    return float(completion == answer)


def length(completion):
    return len(completion)


def numpy_number(completion):
    return np.float32(0.5)


def all_columns(completion, **columns):
    return len(columns)


def with_default(completion, bonus=0.25):
    return bonus


def keyword_only(completion, *, answer):
    return float(completion == answer)


def raises(completion):
    return 1 / (len(completion) - len(completion))


def exits(completion):
    sys.exit("enough")


def hangs(completion):
    if completion == "hang":
        Path(os.environ["HANGING"]).write_text(str(os.getpid()))
        signal.pause()
    return 1.0


def hangs_with_child(completion):
    child = subprocess.Popen(["sleep", "600"])
    Path(os.environ["HANGING"]).write_text(str(child.pid))
    signal.pause()


def dies(completion):
    if completion == "die":
        os._exit(7)
    return 1.0


def crashes(completion):
    os.kill(os.getpid(), signal.SIGSEGV)


def prints(completion):
    print('{"value": 99}', flush=True)
    os.write(1, b'{"value": 98}\n')
    subprocess.run(["echo", '{"value": 97}'], check=True)
    return float(sys.stdin.read() == "")


def returns(completion):
    return {"none": None, "bool": True, "text": "1.0", "nan": float("nan"), "inf": -float("inf")}[
        completion
    ]


def slow_echo(completion):
    time.sleep(0.01 * (int(completion) % 3))
    return int(completion)


def pid(completion):
    return os.getpid()


async def asynchronous(completion):
    return 1.0


def no_completion(*, answer):
    return 1.0


not_a_function = 3


def hangs_once(completion):
    """The first call of all says who it is, and stays."""
    try:
        with Path(os.environ["ONCE"]).open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return 1.0
    time.sleep(600)
    return 0.0


def held(completion):
    """Says who it is, and stays until that is taken away."""
    if completion == "hold":
        path = Path(os.environ["HELD"])
        fresh = path.with_suffix(".new")
        fresh.write_text(str(os.getpid()))
        fresh.rename(path)
        while path.exists():
            time.sleep(0.01)
    return 1.0


def kills_its_parent(completion):
    if completion == "kill":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return 1.0
