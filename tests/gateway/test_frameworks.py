"""Frameworks that agents are written in, unchanged: LangGraph, OpenAI's Agents SDK, verifiers."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from rollout_service import adapters
from rollout_service.gateway.sessions import Session
from tests.gateway.conftest import Served


def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: One.
        b: Other.
    """
    return str(a + b)


def one_sequence(session: Session, answers: int = 2) -> None:
    sampled = session.conversation.sampled()
    assert len(session.conversation.delivered) == answers
    assert sampled.branch_starts == ()
    assert int(sampled.loss_mask.sum()) == sum(
        a.token_ids.size for a in session.conversation.answers
    )


async def test_langgraph(served: Served) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    session = served.open()
    model = ChatOpenAI(model="policy", base_url=f"{served.url}/v1", api_key=session.key)  # type: ignore[arg-type]
    agent = create_react_agent(model, [tool(add)])
    result = await agent.ainvoke({"messages": [("user", "add 3 4")]})
    assert result["messages"][-1].content == "It is 7."
    one_sequence(session)


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents_sdk(served: Served, api: str) -> None:
    import agents

    agents.set_tracing_disabled(True)
    session = served.open()
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=session.key)
    model: Any
    if api == "chat":
        model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
    else:
        model = agents.OpenAIResponsesModel(model="policy", openai_client=client)
    agent = agents.Agent(name="Adder", tools=[agents.function_tool(add)], model=model)
    result = await agents.Runner.run(agent, "add 2 5 and 1 6")
    await client.close()
    assert result.final_output == "It is 7 and 7."
    one_sequence(session)


async def test_verifiers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of verifiers, installed as its users install theirs, through the adapter."""
    import verifiers.legacy as vf
    from datasets import Dataset

    def right(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"] == f"It is {answer}.")

    def load_environment(answer: str) -> Any:
        rows = [{"prompt": [{"role": "user", "content": "unused"}], "answer": answer}]
        return vf.ToolEnv(
            dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[right])
        )

    module = types.ModuleType("adding")
    module.load_environment = load_environment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "adding", module)
    session = served.open()
    task = SimpleNamespace(
        messages=[{"role": "user", "content": "add 3 4"}],
        columns={"environment": "adding", "environment_args": {"answer": "7"}, "answer": "7"},
        index=0,
    )
    where = SimpleNamespace(base_url=f"{served.url}/v1", api_key=session.key)
    outcome = await adapters.verifiers(task, where)
    assert outcome["score"] == 1.0
    assert outcome["total_tool_calls"] == 1.0
    one_sequence(session)
