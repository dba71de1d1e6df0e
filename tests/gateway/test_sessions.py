"""Sessions over HTTP: keys, rewards, retries, answers that nobody received, too much at once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from leeway.errors import DataError, RewardError
from leeway.trajectory import Sampling, Task
from rollout_service.gateway.answering import Gateway
from rollout_service.gateway.requests import Ask, OverBudgetError, SessionError
from tests.gateway.conftest import Served
from tests.waiting import eventually

QUESTION: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "add 3 4"}]}
TASK = Task("t-1", 0, ({"role": "user", "content": "add 3 4"},), {"answer": 7}, 2, Sampling(), 5)


def client(served: Served, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=served.url, headers={"Authorization": f"Bearer {key}"}, timeout=30
    )


async def test_a_program_elsewhere_opens_asks_rates_and_closes(served: Served) -> None:
    session = served.open()
    served.offered.append((session, TASK, 1))
    async with client(served, "whoever") as http:
        opened = (await http.post("/sessions")).json()
        assert opened["task"] == {
            "task_id": "t-1",
            "index": 1,
            "messages": [{"role": "user", "content": "add 3 4"}],
            "columns": {"answer": 7},
        }
        busy = await http.post("/sessions")
        assert busy.status_code == 429
        assert float(busy.headers["Retry-After"]) > 0
    async with client(served, opened["api_key"]) as http:
        answer = (await http.post(opened["base_url"] + "/chat/completions", json=QUESTION)).json()
        path = f"/sessions/{opened['id']}"
        await http.post(f"{path}/rewards", json={"turn": answer["id"], "reward": 0.25})
        await http.post(f"{path}/rewards", json={"score": 1, "format": 0.5})
        wrong = await http.post(f"{path}/rewards", json={"score": True})
        assert wrong.status_code == 400
        assert "score = True (bool)" in wrong.json()["error"]["message"]
        closed = await http.post(f"{path}/close", json={"reward": 0.75})
        assert closed.status_code == 200
        after = await http.post("/v1/chat/completions", json=QUESTION)
        assert after.status_code == 401
    assert session.closed.is_set()
    assert session.worth() == (1.0, 1.0)
    assert session.outcome.parts == {"format": 0.5}


@pytest.mark.parametrize(
    ("turns", "outcome", "worth"),
    [
        ([0.5], {}, (0.5, 0.5)),
        ([0.5, 0.25], {"score": 1.0}, (1.0, 1.75)),
        ([0.5], {"score": 1.0, "reward": 0.0}, (1.0, 0.5)),
        ([], {"reward": -1}, (-1.0, -1.0)),
    ],
)
async def test_what_a_session_was_worth(
    served: Served, turns: list[float], outcome: dict[str, float], worth: tuple[float, float]
) -> None:
    session = served.open()
    ask = Ask(messages=({"role": "user", "content": "add 3 4"},))
    for number, reward in enumerate(turns):
        await session.ask(ask, str(number)).deliver()
        session.rate(reward)
    session.finish(outcome)
    assert session.worth() == worth


async def test_nobody_s_reward_is_no_reward_of_0(served: Served) -> None:
    session = served.open()
    with pytest.raises(RewardError, match="without a reward"):
        session.worth()
    with pytest.raises(DataError, match="nan"):
        session.finish({"score": float("nan")})


async def test_a_retry_gets_the_same_answer_and_leaves_no_orphan(served: Served) -> None:
    session = served.open(temperature=4.0)
    async with client(served, session.key) as http:
        for headers in ({"Idempotency-Key": "k"}, {"x-stainless-retry-count": "1"}):
            body = {**QUESTION, "user": next(iter(headers))}
            first_headers = headers if "Idempotency-Key" in headers else {}
            first = await http.post("/v1/chat/completions", json=body, headers=first_headers)
            again = await http.post("/v1/chat/completions", json=body, headers=headers)
            assert first.json() == again.json()
        assert len(session.conversation.answers) == 2
        await http.post("/v1/chat/completions", json=QUESTION)
        await http.post("/v1/chat/completions", json=QUESTION)
    assert len(session.conversation.answers) == 4, "without a sign of a retry, each is its own"


async def test_a_client_that_left_gets_its_answer_later_or_never(served: Served) -> None:
    session = served.open(temperature=4.0)
    async with client(served, session.key) as http:
        for key in ("comes back", "does not"):
            asking = asyncio.create_task(
                http.post("/v1/chat/completions", json=QUESTION, headers={"Idempotency-Key": key})
            )
            await eventually(lambda: served.engine.stats().running == 1, "the engine")
            asking.cancel()
            await asyncio.wait({asking})
            await eventually(lambda: served.engine.stats().running == 0, "the engine")
        await eventually(lambda: len(session.conversation.answers) == 2, "the engine")
        assert session.conversation.delivered == []
        again = await http.post(
            "/v1/chat/completions", json=QUESTION, headers={"Idempotency-Key": "comes back"}
        )
        assert again.status_code == 200
    (delivered,) = session.conversation.delivered
    trained = session.conversation.sampled()
    assert int(trained.loss_mask.sum()) == delivered.token_ids.size


async def test_a_stream_that_its_client_leaves_is_not_trained(served: Served) -> None:
    session = served.open()
    async with (
        client(served, session.key) as http,
        http.stream("POST", "/v1/chat/completions", json={**QUESTION, "stream": True}) as response,
    ):
        async for _ in response.aiter_lines():
            break
    await eventually(lambda: len(session.conversation.answers) == 1, "the engine")
    assert session.conversation.delivered == []


async def test_too_much_at_once_is_asked_to_come_again(served: Served) -> None:
    full = Gateway(served.engine, served.gateway._renderer, served.gateway.form, max_requests=1)
    session = full.open(Sampling(temperature=0.0, max_new_tokens=60), 0)
    ask = Ask(messages=({"role": "user", "content": "add 3 4"},))
    first = session.ask(ask, "one")
    await asyncio.sleep(0)
    second = session.ask(ask, "two")
    with pytest.raises(OverBudgetError, match="limit is 1"):
        await second.result()
    await first.result()
    again = session.ask(ask, "two", retry=True)
    assert again is not second, "what failed is tried again"
    await again.result()


async def test_an_ended_session_cancels_what_is_under_way(served: Served) -> None:
    session = served.open()
    call = session.ask(Ask(messages=({"role": "user", "content": "add 3 4"},)), "one")
    await asyncio.sleep(0)
    await served.gateway.close(session)
    with pytest.raises(SessionError):
        await call.result()
    with pytest.raises(SessionError):
        session.ask(Ask(messages=({"role": "user", "content": "x"},)), "two")
    await eventually(lambda: served.engine.stats().running == 0, "the engine")


async def test_siblings_share_nothing(served: Served) -> None:
    """What one session's client does to its messages is not seen by another's."""
    messages = ({"role": "user", "content": "add 3 4"},)
    one, other = served.open(), served.open()
    await one.ask(Ask(messages=messages), "a").deliver()
    await other.ask(Ask(messages=messages), "a").deliver()
    first, second = one.conversation.answers[0], other.conversation.answers[0]
    assert np.array_equal(first.token_ids, second.token_ids)
    assert not np.shares_memory(first.token_ids, second.token_ids)
    assert one.said(first.answer_id)[-1] is not other.said(second.answer_id)[-1]
