"""Whatever a reward function does, its call ends in time with a number or a clear, typed error."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from leeway.config import Config
from leeway.errors import ConfigError, InfrastructureError, LeewayError, RewardError
from rollout_service.rewards import Scorer
from rollout_service.sandbox.pool import WorkerPool
from rollout_service.sandbox.work import Work
from tests.sandboxes import PLACES, ended, under_way, workers
from tests.waiting import alive

FUNCTIONS = Path(__file__).with_name("functions.py")


def spec(name: str) -> str:
    return f"{FUNCTIONS}:{name}"


@pytest.fixture(params=PLACES)
def pool(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens what scores by a function, on the node or at a sandbox."""

    @asynccontextmanager
    async def opening(
        name: str, processes: int = 1, seconds: float = 30.0
    ) -> AsyncIterator[Scorer]:
        task = {"reward": spec(name), "reward_processes": processes, "reward_seconds": seconds}
        async with workers(request.param, **task) as opened:
            yield Scorer(opened)

    return opening


async def fault(
    pool: Any, name: str, completion: str = "x", columns: dict | None = None
) -> LeewayError:
    async with pool(name) as rewards:
        with pytest.raises(LeewayError) as raised:
            await rewards.score(completion, columns or {})
    return raised.value


# What a function may do ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        ("good", {"answer": "x", "other": 1}, 1.0),
        ("length", {"answer": "x"}, 1.0),
        ("numpy_number", {}, 0.5),
        ("all_columns", {"a": 1, "completion": "taken", "b": [1]}, 2.0),
        ("with_default", {}, 0.25),
        ("with_default", {"bonus": 2}, 2.0),
        ("keyword_only", {"answer": "x"}, 1.0),
        ("prints", {}, 1.0),
    ],
)
async def test_a_function_gets_the_columns_it_accepts(pool, name, columns, expected):
    async with pool(name) as rewards:
        score = await rewards.score("x", columns)
        assert score == expected
        assert type(score) is float
        # The pipe is still in step.
        assert await rewards.score("x", columns) == expected


async def test_calls_run_at_once_and_each_gets_its_own_answer(pool):
    async with pool("slow_echo", processes=3) as rewards:
        scores = await asyncio.gather(*(rewards.score(str(i), {}) for i in range(30)))
    assert scores == list(range(30))


async def test_no_more_processes_than_asked_for(pool):
    async with pool("pid", processes=2) as rewards:
        pids = await asyncio.gather(*(rewards.score("", {}) for _ in range(20)))
        assert len(set(pids)) <= 2
        assert all(alive(int(pid)) for pid in pids)
    assert not any(alive(int(pid)) for pid in pids)


async def test_text_that_is_no_clean_unicode_survives(pool):
    async with pool("length") as rewards:
        assert await rewards.score("a\n\u2028\udcff", {}) == 4


# What a function must not do ----------------------------------------------------------------------


async def test_raising(pool):
    error = await fault(pool, "raises")
    assert isinstance(error, RewardError)
    assert str(error).startswith(
        f"{spec('raises')} raised ZeroDivisionError: division by zero (functions.py:"
    )
    assert str(error).endswith("); handle this case in the function")


async def test_exiting_is_raising(pool):
    error = await fault(pool, "exits")
    assert isinstance(error, RewardError)
    assert "raised SystemExit: enough" in str(error)


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("none", "returned None (NoneType); return a number, e.g. float(correct)"),
        ("bool", "returned True (bool); return a number, e.g. float(correct)"),
        ("text", "returned '1.0' (str); return a number, e.g. float(correct)"),
        ("nan", "returned nan; return a finite number"),
        ("inf", "returned -inf; return a finite number"),
    ],
)
async def test_returning_what_is_no_finite_number(pool, completion, message):
    error = await fault(pool, "returns", completion)
    assert isinstance(error, RewardError)
    assert str(error) == f"{spec('returns')} {message}"


async def test_a_missing_column(pool):
    error = await fault(pool, "good", columns={"reply": "x", "level": 1})
    assert isinstance(error, RewardError)
    assert str(error) == (
        f"{spec('good')} needs the column 'answer', but the row has ['level', 'reply']; add it to "
        "the data, or give the parameter a default"
    )


async def test_hanging_costs_one_call_and_the_process(pool, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGING", str(tmp_path / "pid"))
    async with pool("hangs", seconds=1.0) as rewards:
        with pytest.raises(RewardError) as raised:
            await rewards.score("hang", {})
        assert str(raised.value) == (
            f"{spec('hangs')} was not done after 1 s and was killed; make it faster, or raise "
            "task.reward_seconds"
        )
        await ended(await under_way(tmp_path / "pid"))
        assert await rewards.score("fine", {}) == 1.0


async def test_a_hanging_call_holds_back_only_its_own_process(pool, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGING", str(tmp_path / "pid"))
    async with pool("hangs", processes=2, seconds=20.0) as rewards:
        hanging = asyncio.create_task(rewards.score("hang", {}))
        await under_way(tmp_path / "pid")
        assert await asyncio.gather(*(rewards.score("fine", {}) for _ in range(5))) == [1.0] * 5
        assert not hanging.done()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        await ended(await under_way(tmp_path / "pid"))
        assert await rewards.score("fine", {}) == 1.0


async def test_what_the_function_started_is_killed_with_it(pool, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGING", str(tmp_path / "pid"))
    async with pool("hangs_with_child", seconds=1.0) as rewards:
        with pytest.raises(RewardError, match="was not done after 1 s"):
            await rewards.score("x", {})
    await ended(await under_way(tmp_path / "pid"))


async def test_dying_is_an_infrastructure_error_and_the_process_is_replaced(pool):
    async with pool("dies") as rewards:
        with pytest.raises(InfrastructureError) as raised:
            await rewards.score("die", {})
        assert str(raised.value) == (
            f"{spec('dies')}: its process died during a call (exit status 7) and is replaced; see "
            "that the code neither exits, crashes nor runs out of memory"
        )
        assert await rewards.score("live", {}) == 1.0


async def test_a_crash_names_the_signal(pool):
    error = await fault(pool, "crashes")
    assert isinstance(error, InfrastructureError)
    assert "died during a call (SIGSEGV)" in str(error)


# What cannot start --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("reward", "write module:function or path/to/file.py:function"),
        ("no/such/file.py:reward", "no file no/such/file.py below"),
        (
            "no_such_module:reward",
            "importing no_such_module raised ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (spec("asynchronous"), "is asynchronous; write a plain function"),
        (spec("no_completion"), "takes no completion; write `def reward(completion, **columns)`"),
        (spec("not_a_function"), "has no function 'not_a_function'; it has: good, length"),
    ],
)
async def test_a_function_that_cannot_be_called_is_a_config_error(reward, message):
    with pytest.raises(ConfigError) as raised:
        async with WorkerPool(Work("reward", reward, processes=1, seconds=1.0)):
            pass
    assert str(raised.value).startswith(f"task.reward = {reward!r}: ")
    assert message in str(raised.value)


async def test_a_file_that_does_not_import_says_where(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos.nothing\n")
    with pytest.raises(ConfigError) as raised:
        async with WorkerPool(Work("reward", f"{broken}:reward", processes=1, seconds=1.0)):
            pass
    assert "raised AttributeError: module 'os' has no attribute 'nothing' (broken.py:2)" in str(
        raised.value
    )


# The end ------------------------------------------------------------------------------------------


async def test_closing_ends_calls_under_way(pool, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGING", str(tmp_path / "pid"))
    async with pool("hangs") as rewards:
        hanging = asyncio.create_task(rewards.score("hang", {}))
        waiting = asyncio.create_task(rewards.score("fine", {}))
        await under_way(tmp_path / "pid")
    for call in (hanging, waiting):
        with pytest.raises(InfrastructureError):
            await call


async def test_workers_end_with_their_process(tmp_path):
    """Also when it is killed during a call."""
    script = textwrap.dedent(
        f"""
        import asyncio
        from rollout_service.sandbox.pool import WorkerPool
        from rollout_service.sandbox.work import Work

        async def main():
            work = Work("reward", {spec("hangs")!r}, processes=1, seconds=600.0)
            async with WorkerPool(work) as workers:
                await workers.call({{"completion": "hang", "columns": {{}}}})

        asyncio.run(main())
        """
    )
    pid_file = tmp_path / "pid"
    node = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "HANGING": str(pid_file)}
    )
    try:
        worker = await under_way(pid_file)
        node.send_signal(signal.SIGKILL)
        await ended(worker)
    finally:
        node.kill()
        node.wait()


async def test_a_config_without_a_reward_scores_with_the_dataset():
    config = Config.model_validate(
        {"model": {"path": "m"}, "task": {"reasoning_gym": {"dataset": "chain_sum"}}}
    )
    source = {"dataset": "chain_sum", "options": {"seed": 1, "size": 10}, "index": 0}
    async with WorkerPool(Work.of(config.task)) as workers:
        rewards = Scorer(workers)
        assert await rewards.score("no idea", {"source": source, "answer": "1"}) < 1.0
