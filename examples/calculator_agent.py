"""An agent with a tool: it lets the model call a calculator, through an unchanged OpenAI client.

    leeway up examples/calculator_agent.yaml

The model asks for the calculator in words (CALC: 357 * 42), reads what it says (RESULT: 14994), and
answers (ANSWER: 14994). Nothing here knows of Leeway: `session` says where the policy is served,
which any client understands.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import openai

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALL = re.compile(r"CALC: (\d+) ([-+*]) (\d+)")


async def run(task: Any, session: Any) -> dict[str, float]:
    """0.2 for a call that can be computed and ends there, 0.8 for the right answer after it."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:

        async def ask(messages: list[Any]) -> tuple[str, bool]:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            choice = answer.choices[0]
            return choice.message.content or "", choice.finish_reason == "stop"

        messages = list(task.messages)
        said, ended = await ask(messages)
        call = CALL.fullmatch(said.strip())
        if call is None or not ended:
            return {"score": 0.0, "well_formed": 0.0, "right": 0.0}
        a, sign, b = call.groups()
        result = OPERATIONS[sign](int(a), int(b))
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"RESULT: {result}"},
        ]
        said, ended = await ask(messages)
        right = ended and said.strip() == f"ANSWER: {task.columns['answer']}"
        return {"score": 0.2 + 0.8 * right, "well_formed": 1.0, "right": float(right)}
