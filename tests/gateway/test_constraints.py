"""Constrained answers: every name by which clients ask for them, who serves them and who refuses,
and that none is ever trained."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from leeway.errors import DataError
from leeway.trajectory import Purpose, Sampling, Task
from rollout_service.answers import AnswerFormat
from rollout_service.engines.constraint import ConstraintKind
from rollout_service.gateway.answering import Gateway
from rollout_service.gateway.constraints import parse_constraint
from rollout_service.gateway.server import build_app, serve
from rollout_service.gateway.sessions import Session
from rollout_service.prompts import Renderer
from rollout_service.workflows.agents import Agents
from rollout_service.workflows.base import Event, Failed, Finished, Sample
from tests.gateway.conftest import Served
from tests.rollout import servers
from tests.rollout.tiny_models import save_tiny_model
from trajectory_queue.client import FailureKind

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
ANY_OBJECT = {"type": "object"}
DIGITS = "[0-9]{3}"
YES_NO = 'root ::= "yes" | "no"'
MESSAGES = [{"role": "user", "content": "add 3 4"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "add 3 4"},
    "/v1/responses": {"input": "add 3 4"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 64},
}
# By field: what a client sends, and what it means.
NAMES: dict[str, tuple[Any, ConstraintKind, Any]] = {
    field: (value, kind, meant)
    for kind, meant, fields in [
        (
            ConstraintKind.JSON_SCHEMA,
            SCHEMA,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
                },
                "text.format": {"type": "json_schema", "name": "a", "schema": SCHEMA},
                "output_format": {"type": "json_schema", "schema": SCHEMA},
                "output_config.format": {"type": "json_schema", "schema": SCHEMA},
                "structured_outputs.json": SCHEMA,
                "guided_json": SCHEMA,
                "json_schema": json.dumps(SCHEMA),
            },
        ),
        (
            ConstraintKind.REGEX,
            DIGITS,
            {"structured_outputs.regex": DIGITS, "guided_regex": DIGITS, "regex": DIGITS},
        ),
        (
            ConstraintKind.GRAMMAR,
            YES_NO,
            {
                "structured_outputs.choice": ["yes", "no"],
                "structured_outputs.grammar": YES_NO,
                "guided_choice": ["yes", "no"],
                "guided_grammar": YES_NO,
                "ebnf": YES_NO,
                "grammar": YES_NO,
            },
        ),
    ]
    for field, value in fields.items()
}
FREE = {
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "guided_json": None,
    "logit_bias": {},
}


def asking(field: str, value: Any) -> dict[str, Any]:
    outer, _, inner = field.partition(".")
    return {outer: {inner: value} if inner else value}


@pytest.mark.parametrize("field", NAMES)
def test_every_name_of_a_constraint_is_read(field: str) -> None:
    value, kind, meant = NAMES[field]
    constraint = parse_constraint(asking(field, value))
    assert constraint is not None
    assert (constraint.kind, constraint.field) == (kind, field)
    text = constraint.text
    assert (json.loads(text) if kind is ConstraintKind.JSON_SCHEMA else text) == meant


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {"text": {"format": {"type": "json_object"}}},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_any_json_object(body: dict[str, Any]) -> None:
    constraint = parse_constraint(body)
    assert constraint is not None
    assert json.loads(constraint.text) == ANY_OBJECT


def test_a_free_answer_has_no_constraint() -> None:
    assert parse_constraint(FREE) is None


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"logit_bias": {"5": 10}}, "logit_bias = .*ask for the format in the prompt"),
        ({"structural_tag": "{}"}, "structural_tag = "),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag = "),
        ({"response_format": {"type": "xml"}}, "response_format = .*text, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format = .*JSON schema"),
        ({"guided_json": "[1]"}, "guided_json = .*an object"),
        ({"json_schema": "{"}, "json_schema = .*not JSON"),
        ({"regex": 5}, "regex = 5: send text"),
        ({"regex": " "}, "regex = ' ': give a constraint"),
        ({"ebnf": "x" * 70_000}, "ebnf = .*at most 65536"),
        ({"guided_choice": "yes"}, "guided_choice = .*a list of texts"),
        ({"regex": "a", "ebnf": YES_NO}, "regex, ebnf: an answer follows one constraint"),
    ],
)
def test_what_is_no_constraint_is_said_by_its_field(body: dict[str, Any], fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        parse_constraint(body)


@pytest.mark.parametrize("path", DIALECTS)
async def test_an_engine_that_cannot_refuses_in_all_dialects(served: Served, path: str) -> None:
    session = served.open()
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {session.key}"}) as http:
        for field, (value, _, _) in NAMES.items():
            body = {**DIALECTS[path], **asking(field, value)}
            answer = await http.post(served.url + path, json=body)
            assert answer.status_code == 400, field
            message = answer.json()["error"]["message"]
            assert message.startswith(f"{field} = "), message
            assert "use rollout.engine.kind sglang or vllm" in message
        assert session.conversation.answers == []
        answer = await http.post(served.url + path, json={**DIALECTS[path], **FREE}, timeout=60)
        assert answer.status_code == 200


async def test_a_constrained_answer_cannot_call_tools(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    body = {"messages": MESSAGES, "tools": [tool], "regex": DIGITS}
    session = served.open()
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {session.key}"}) as http:
        answer = await http.post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "cannot call a tool; ask with tool_choice none" in answer.json()["error"]["message"]


class Answer(BaseModel, extra="forbid"):
    ok: bool


class _Asks:
    """A program that asks through the unchanged OpenAI client: constrained, and freely if told."""

    def __init__(self, url: str, *, freely: bool) -> None:
        self._url = url
        self._freely = freely

    async def run(self, sample: Sample, session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key=session.key) as client:
            parsed = await client.chat.completions.parse(
                model="policy",
                messages=[{"role": "user", "content": "abc"}],
                response_format=Answer,
            )
            message = parsed.choices[0].message
            assert isinstance(message.parsed, Answer)
            if self._freely:
                await client.chat.completions.create(
                    model="policy",
                    messages=[
                        {"role": "user", "content": "abc"},
                        {"role": "assistant", "content": message.content},
                        {"role": "user", "content": "def"},
                    ],
                )
        session.finish(0.5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", servers.SERVERS)
async def test_on_a_real_server_a_constrained_answer_is_context(kind: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    log = tmp_path / "server.log"
    async with servers.connected(servers.KINDS[kind], model, log) as engine:
        tokenizer = AutoTokenizer.from_pretrained(model)
        renderer = Renderer(tokenizer, engine.context_length, 64)
        gateway = Gateway(engine, renderer, AnswerFormat(tokenizer), max_requests=8)
        served = Served(gateway, engine, "", [])
        app = build_app(gateway, "policy", served, token=None)
        async with serve(app, "127.0.0.1:0") as address:
            url = f"http://{address}"
            await _every_dialect_is_served(url, served)
            mixed = await _trajectory(gateway, url, Purpose.TRAIN, freely=True)
            assert isinstance(mixed, Finished), mixed
            trajectory = mixed.trajectory
            text = tokenizer.decode(
                trajectory.token_ids[trajectory.prompt_length :], skip_special_tokens=True
            )
            assert Answer.model_validate_json(text.partition("}")[0] + "}")
            first = int(np.flatnonzero(trajectory.loss_mask)[0])
            answer = trajectory.token_ids[trajectory.prompt_length + first :]
            assert trajectory.loss_mask[first:].all()
            assert trajectory.logprobs[first:].all()
            assert not trajectory.logprobs[:first].any()
            assert first > len('{"ok":true}')
            assert answer.size > 0
            # Of constrained answers alone nothing can be learned; an evaluation may be so.
            nothing = await _trajectory(gateway, url, Purpose.TRAIN, freely=False)
            assert isinstance(nothing, Failed)
            assert nothing.kind is FailureKind.DATA
            assert "all answers of the session were constrained" in nothing.reason
            judged = await _trajectory(gateway, url, Purpose.EVAL, freely=False)
            assert isinstance(judged, Finished), judged
            assert judged.trajectory.score == 0.5
            assert judged.trajectory.trained_tokens == 0


async def _every_dialect_is_served(url: str, served: Served) -> None:
    session = served.open(temperature=1.0)
    async with httpx.AsyncClient(
        headers={"Authorization": f"Bearer {session.key}"}, timeout=120
    ) as http:
        for path, body in DIALECTS.items():
            for stream in (False, True):
                asked = {**body, "guided_regex": DIGITS, "stream": stream}
                answer = await http.post(url + path, json=asked)
                assert answer.status_code == 200, answer.text
                answer = await http.post(url + path, json={**asked, "guided_regex": "(["})
                assert answer.status_code == 400, answer.text
    texts = [
        served.gateway.form.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        for answer in session.conversation.answers
    ]
    assert len(texts) == 2 * len(DIALECTS)
    assert all(len(text) == 3 and text.isdigit() for text in texts), texts


async def _trajectory(gateway: Gateway, url: str, purpose: Purpose, *, freely: bool) -> Event:
    task = Task("t", 0, tuple(MESSAGES), {}, 2, Sampling(max_new_tokens=64), 3, purpose)
    told: list[Event] = []

    async def tell(event: Event) -> None:
        told.append(event)

    async with asyncio.timeout(120):
        program = _Asks(url, freely=freely)
        await Agents(gateway, program, "node", 100.0).run([Sample("t/0", task, 0)], tell)
    return told[-1]
