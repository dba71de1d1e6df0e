"""What a client wants its answer held to, by whatever name its dialect or server gives it.

All names are read in all dialects: clients send OpenAI's and Anthropic's, and in `extra_body` those
of vLLM, SGLang and llama.cpp. What none of the engines' three kinds can say is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from leeway.errors import DataError
from rollout_service.engines.constraint import Constraint, ConstraintKind

_ANY_OBJECT = {"type": "object"}
_TYPES = ("json_schema", "json_object")


def parse_constraint(body: Mapping[str, Any]) -> Constraint | None:
    """None when the answer is free.

    Raises:
        DataError: naming the field: what it asks for cannot be served, or it is one of several.
    """
    for path in _REFUSED:
        if value := _at(body, path):
            raise DataError(
                f"{path} = {value!r:.80}: only a JSON schema, a regular expression or a grammar is "
                "followed; send one of these, or ask for the format in the prompt"
            )
    given = [
        found
        for path, read in _READERS.items()
        if (value := _at(body, path)) and (found := read(path, value)) is not None
    ]
    if len(given) > 1:
        names = ", ".join(constraint.field for constraint in given)
        raise DataError(f"{names}: an answer follows one constraint; send one of these fields")
    return given[0] if given else None


def _at(body: Mapping[str, Any], path: str) -> Any:
    value: Any = body
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _format(field: str, value: Any) -> Constraint | None:
    """OpenAI's and Anthropic's, which say their type; llama.cpp's json_object may have a schema."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind not in _TYPES:
        raise DataError(f"{field} = {value!r:.80}: its type is one of text, {', '.join(_TYPES)}")
    inner = value.get("json_schema")
    schema = (inner if isinstance(inner, Mapping) else value).get("schema")
    return _schema(field, _ANY_OBJECT if kind == "json_object" and schema is None else schema)


def _schema(field: str, value: Any) -> Constraint:
    text = value if isinstance(value, str) else json.dumps(value)
    return Constraint(ConstraintKind.JSON_SCHEMA, text, field)


def _json_object(field: str, value: Any) -> Constraint:
    return _schema(field, _ANY_OBJECT)


def _text(kind: ConstraintKind) -> Callable[[str, Any], Constraint]:
    def read(field: str, value: Any) -> Constraint:
        if not isinstance(value, str):
            raise DataError(f"{field} = {value!r:.80}: send text")
        return Constraint(kind, value, field)

    return read


def _choice(field: str, value: Any) -> Constraint:
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise DataError(f"{field} = {value!r:.80}: send a list of texts")
    choices = " | ".join(map(json.dumps, value))
    return Constraint(ConstraintKind.GRAMMAR, f"root ::= {choices}", field)


_regex, _grammar = _text(ConstraintKind.REGEX), _text(ConstraintKind.GRAMMAR)

_READERS: Mapping[str, Callable[[str, Any], Constraint | None]] = {
    # OpenAI, Anthropic.
    "response_format": _format,
    "text.format": _format,
    "output_format": _format,
    "output_config.format": _format,
    # vLLM, today's and its earlier names.
    "structured_outputs.json": _schema,
    "structured_outputs.json_object": _json_object,
    "structured_outputs.regex": _regex,
    "structured_outputs.choice": _choice,
    "structured_outputs.grammar": _grammar,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    # SGLang, llama.cpp.
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _grammar,
}
_REFUSED = ("logit_bias", "structural_tag", "structured_outputs.structural_tag")
