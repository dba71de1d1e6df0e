"""`leeway up` from outside: it finishes, survives deaths, stops in time, leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from tests.waiting import children, gone, until

SECONDS = 120.0
REWARD = """
def reward(completion, **columns):
    return sum(character in "aeiou" for character in completion) / 12
"""
# One node could have all batches before the other is up: none gets on until both are at work.
REWARD_OF_TWO_NODES = f"""
import os, pathlib, time
{REWARD}
at_once, AT_WORK = reward, pathlib.Path(__file__).with_name("at_work")

def reward(completion, **columns):
    AT_WORK.mkdir(exist_ok=True)
    (AT_WORK / str(os.getppid())).touch()
    while len(list(AT_WORK.iterdir())) < 2:
        time.sleep(0.02)
    return at_once(completion, **columns)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("model"))


class Run:
    """One `leeway up` on a tiny model."""

    def __init__(self, directory: Path, model: Path, *overrides: str) -> None:
        self.directory = directory
        self.path = directory / "runs" / "tiny"
        rows = [{"prompt": f"say {word}", "answer": word} for word in "abcdefghijklmnopqrstuvwxyz"]
        (directory / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        (directory / "rewards.py").write_text(REWARD)
        settings = {
            "run": {"name": "tiny", "directory": str(directory / "runs"), "seed": 3},
            "model": {"path": str(model)},
            "task": {
                "jsonl": str(directory / "rows.jsonl"),
                "reward": f"{directory / 'rewards.py'}:reward",
                "heldout": 4,
            },
            "sampling": {"group_size": 4, "max_new_tokens": 12},
            "queue": {"lease_seconds": 5},
            "rollout": {"heartbeat_seconds": 1},
            "trainer": {"batch_groups": 4, "steps": 6, "lr": 1e-3, "checkpoint_every": 2},
        }
        self.config = directory / "run.yaml"
        self.config.write_text(json.dumps(settings))
        self.overrides = overrides
        self.output = directory / "output.txt"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *overrides: str) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "leeway.cli",
                    "up",
                    str(self.config),
                    *self.overrides,
                    *overrides,
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
            )
        self._processes.append(process)
        return process

    def end(self) -> None:
        """Kills what a failed test left; the children see it, and end."""
        for process in self._processes:
            process.kill()
            process.wait()

    @property
    def temporary(self) -> Path:
        path = self.directory / "tmp"
        path.mkdir(exist_ok=True)
        return path

    def steps(self) -> list[dict]:
        file = self.path / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row for row in rows if row["kind"] == "step"]

    def said(self) -> str:
        logs = "".join(path.read_text() for path in sorted((self.path / "logs").glob("*.log")))
        return self.output.read_text() + logs

    def summary(self) -> dict:
        return json.loads((self.path / "summary.json").read_text())


def child(process: subprocess.Popen[bytes], word: str) -> psutil.Process:
    found = children(process.pid, lambda command: word in command)
    assert found, f"no child with {word!r}"
    return found[0]


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Iterator[Run]:
    made = Run(tmp_path, model)
    yield made
    made.end()


@pytest.mark.slow
def test_a_run_finishes_and_leaves_what_it_promises(run: Run) -> None:
    process = run.start()
    assert process.wait(SECONDS) == 0, run.said()
    summary = run.summary()
    assert summary["versions"] == 6
    assert (summary["lost"], summary["twice"]) == (0, 0)
    assert summary["staleness_max"] <= 2
    assert summary["heldout_before"] is not None and summary["heldout_after"] is not None
    assert (run.path / "curves.png").read_bytes().startswith(b"\x89PNG")
    export = run.path / "checkpoints" / "export"
    AutoModelForCausalLM.from_pretrained(export)
    assert AutoTokenizer.from_pretrained(export).chat_template
    text = (run.path / "config.yaml").read_text()
    assert "token: null" in text, "secrets are left out"
    assert list(run.temporary.iterdir()) == []
    output = run.output.read_text()
    assert "step 6/6" in output and "queue:" in output, "plain lines when not a terminal"

    again = run.start()
    assert again.wait(SECONDS) != 0
    assert "finished run" in run.output.read_text()


@pytest.mark.slow
def test_nodes_share_each_batch_when_they_go_in_step(run: Run) -> None:
    (run.directory / "rewards.py").write_text(REWARD_OF_TWO_NODES)
    process = run.start(
        "staleness.budget=0",
        "rollout.nodes=2",
        "telemetry.spans=true",
        "task.heldout=0",
        "task.reward_seconds=90",
    )
    assert process.wait(SECONDS) == 0, run.said()
    spans = [
        (file.stem, json.loads(line)["name"])
        for file in run.path.glob("spans-node-*.jsonl")
        for line in file.read_text().splitlines()
    ]
    generated = Counter(node for node, name in spans if name == "generate")
    # Which node asks first is open; a batch is two nodes' work.
    assert len(generated) == 2 and generated.total() >= 2 * len(run.steps())


@pytest.mark.slow
@pytest.mark.parametrize("word", ["trainer", "rollout", "serve"])
def test_a_killed_process_is_started_again_and_nothing_is_lost(run: Run, word: str) -> None:
    process = run.start("trainer.steps=40")  # It must not be over before the signal is sent.
    until(lambda: len(run.steps()) >= 3, "three steps", SECONDS, run.said)
    child(process, word).send_signal(signal.SIGKILL)
    assert process.wait(SECONDS) == 0, run.said()
    summary = run.summary()
    assert summary["versions"] == 40
    assert (summary["lost"], summary["twice"]) == (0, 0)
    assert summary["staleness_max"] <= 2


@pytest.mark.slow
def test_ctrl_c_stops_within_five_seconds_and_the_run_goes_on_later(run: Run) -> None:
    process = run.start("trainer.steps=1000", "trainer.checkpoint_every=1000")
    until(lambda: len(run.steps()) >= 3, "three steps", SECONDS, run.said)
    family = children(process.pid)
    live = run.path / "live.yaml"
    assert live.stat().st_mode & 0o077 == 0, "it holds the token"
    command = [sys.executable, "-m", "leeway.cli", "status", str(live)]
    status = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert status.stdout.startswith(f"run {run.path.name}: version ")
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0, run.said()
    assert time.monotonic() - started < 5.0
    until(lambda: gone(family), "children gone", 1.0, run.said)
    assert list(run.temporary.iterdir()) == [] and not live.exists()
    assert "stopping" in (run.path / "logs" / "trainer.log").read_text(), "its last words"
    latest = (run.path / "checkpoints" / "LATEST").read_text()
    stopped_at = int(latest.removeprefix("step-"))
    assert stopped_at >= 3

    process = run.start(f"trainer.steps={stopped_at + 3}")
    assert process.wait(SECONDS) == 0, run.said()
    summary = run.summary()
    assert summary["versions"] == stopped_at + 3
    assert (summary["lost"], summary["twice"]) == (0, 0)


@pytest.mark.slow
def test_sigkill_leaves_no_process_and_no_temporary_directory(run: Run) -> None:
    process = run.start("trainer.steps=1000")
    until(lambda: len(run.steps()) >= 1, "a step", SECONDS, run.said)
    family = children(process.pid)
    assert len(family) >= 5
    process.kill()
    process.wait()
    until(lambda: gone(family), "children gone", 10.0, run.said)
    assert list(run.temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/does/not/exist", "/does/not/exist"),
        ("task.jsonl=/does/not/exist.jsonl", "cannot be read"),
        ("task.reward=/does/not/exist.py:reward", "/does/not/exist.py"),
        ("sampling.max_new_tokens=1000", "sampling.max_new_tokens = 1000"),
    ],
)
def test_what_cannot_work_ends_the_run_with_its_reason(
    run: Run, override: str, message: str
) -> None:
    process = run.start(override)
    assert process.wait(SECONDS) != 0
    output = " ".join(run.output.read_text().split())
    assert "The run ended" in output and message in output


@pytest.mark.slow
def test_a_bad_row_and_a_reward_that_raises_cost_only_themselves(run: Run) -> None:
    rows = run.directory / "rows.jsonl"
    long = "x" * 300
    rows.write_text(
        "\n".join(
            [
                "{not json",
                json.dumps({"prompt": long, "answer": "x"}),
                *rows.read_text().split("\n"),
            ]
        )
    )
    (run.directory / "rewards.py").write_text(
        "import time\n"
        "def reward(completion, prompt, **columns):\n"
        "    if prompt == 'say a': raise ValueError('no a')\n"
        "    if prompt == 'say b': return 'text'\n"
        "    if prompt == 'say c': return float('nan')\n"
        "    if prompt == 'say d': time.sleep(60)\n"
        "    return sum(character in 'aeiou' for character in completion) / 12\n"
    )
    process = run.start("trainer.steps=12", "task.reward_seconds=0.5", "task.heldout=0")
    assert process.wait(SECONDS) == 0, run.said()
    summary = run.summary()
    assert (summary["lost"], summary["twice"]) == (0, 0)
    assert summary["groups"]["dead"] >= 1
    said = run.said()
    for words in ("rows.jsonl:1", "no a", "'text'", "nan", "0.5 s", "limit is"):
        assert words in said, f"{words!r} is not said"


@pytest.mark.slow
def test_what_auto_decides_is_applied_and_told(run: Run) -> None:
    """A budget and a concurrency that the run tunes itself, seen through every window on it."""
    process = run.start(
        "trainer.steps=400",
        "trainer.checkpoint_every=1000",
        "staleness.budget=auto",
        # Answers take longer than steps: the trainer waits although all places are taken.
        "staleness.auto={lowest: 1, highest: 3, highest_chi2: 1000, lowest_sample_size: 0}",
        "staleness.auto.highest_clip_fraction=1",
        "sampling.max_new_tokens=48",
        "rollout.concurrency=auto",
        "rollout.auto={lowest: 4, highest: 64, increase: 4, period_seconds: 0.2}",
        "task.heldout=0",
    )
    live = run.path / "live.yaml"

    def command(name: str) -> str:
        ask = [sys.executable, "-m", "leeway.cli", name, str(live)]
        return subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout

    def widened() -> bool:
        return any(step["staleness_budget"] > 1 for step in run.steps())

    until(widened, "a wider budget", SECONDS, run.said)
    assert "budget 1 -> 2, by auto (both sides wait for it" in command("status")
    url = command("page").strip()
    assert f"Watch it at {url}" in run.output.read_text()
    with urllib.request.urlopen(url, timeout=10) as answer:
        page = answer.read().decode()
    assert "by auto (both sides wait for it" in page
    assert "Mean reward, over" in page
    said = run.said()
    assert "full, and the KV cache" in said, "the node's concurrency grew, with its reason"
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0, run.said()
    assert max(step["staleness_budget"] for step in run.steps()) <= 3
    assert all(step["staleness_max"] <= step["staleness_budget"] for step in run.steps())
