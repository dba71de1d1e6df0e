"""What an answer is held to: a JSON schema, a regular expression or a grammar.

Tokens drawn under a constraint come from another distribution than the policy's own: whoever asks
for one keeps them out of the loss (docs/gateway.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from leeway.errors import DataError

# A grammar is compiled by the server, in a time that grows with it.
_MOST_CHARACTERS = 65_536


class ConstraintKind(Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """Whatever is sampled follows it from the first token on, thoughts included.

    Attributes:
        text: The schema as JSON, the expression, or the grammar in EBNF (GBNF: `root ::= ...`).
        field: By which name it was asked for; errors say it.
    """

    kind: ConstraintKind
    text: str
    field: str

    def __post_init__(self) -> None:
        if not self.text.strip() or "\0" in self.text:
            raise self.fault("give a constraint, or leave the field out")
        if len(self.text) > _MOST_CHARACTERS:
            raise self.fault(f"{len(self.text)} characters; send at most {_MOST_CHARACTERS}")
        if self.kind is ConstraintKind.JSON_SCHEMA:
            try:
                schema = json.loads(self.text)
            except (ValueError, RecursionError) as error:
                raise self.fault(f"not JSON ({error}); send a JSON schema") from error
            if not isinstance(schema, dict):
                raise self.fault("send a JSON schema, which is an object")

    def __str__(self) -> str:
        return f"{self.field} = {self.text!r:.80}"

    def fault(self, remedy: str) -> DataError:
        return DataError(f"{self}: {remedy}")
