"""What narrows the policy's distribution is refused, in all dialects alike."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from tests.gateway.conftest import Served

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
MESSAGES = [{"role": "user", "content": "add 3 4"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "add 3 4"},
    "/v1/responses": {"input": "add 3 4"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 64},
}
CONSTRAINTS = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "text.format": {"type": "json_schema", "name": "a", "schema": SCHEMA},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "output_config.format": {"type": "json_schema", "schema": SCHEMA},
    "structured_outputs": {"json": SCHEMA},
    "guided_json": SCHEMA,
    "guided_regex": "[0-9]+",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'root ::= "yes"',
    "json_schema": "{}",
    "regex": "[0-9]+",
    "ebnf": 'root ::= "yes"',
    "structural_tag": "{}",
    "grammar": 'root ::= "yes"',
    "logit_bias": {"5": 10},
}
FREE = {
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "guided_json": None,
    "logit_bias": {},
}


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_constrained_answer_is_refused(served: Served, path: str) -> None:
    session = served.open()
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {session.key}"}) as http:
        for field, value in CONSTRAINTS.items():
            outer, _, inner = field.partition(".")
            body = {**DIALECTS[path], outer: {inner: value} if inner else value}
            answer = await http.post(served.url + path, json=body)
            assert answer.status_code == 400, field
            message = answer.json()["error"]["message"]
            assert message.startswith(f"{field} = "), message
            assert "ask for the format in the prompt" in message
        assert session.conversation.answers == []
        answer = await http.post(served.url + path, json={**DIALECTS[path], **FREE}, timeout=60)
        assert answer.status_code == 200
