"""Who may call what: the one table of roles and methods.

A certificate names its role in a URI, `spiffe://leeway/<role>`; a token by the key that signed it.
What is not in the table is refused, except the health service, which answers anybody.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from urllib.parse import urlsplit


class Role(StrEnum):
    ROLLOUT = "rollout"
    TRAINER = "trainer"
    OPERATOR = "operator"
    PRODUCER = "producer"
    """Streams trajectories in from elsewhere; it reaches no task but those that it opened."""
    SANDBOX_CLIENT = "sandbox-client"
    """A node at its sandboxes, where it has tokens: they verify with the key that signs, which must
    then lease nothing."""


EVERY_ROLE = frozenset(Role)
NODE_NAME = "leeway-rollout"
"""What the certificate of a rollout node says, by whatever address it is dialled."""
SANDBOX_NAME = "leeway-sandbox"
"""What the certificate of a sandbox says; it gives no role."""
HEALTH = "/grpc.health.v1.Health/"

_ROLLOUT = frozenset({Role.ROLLOUT})
_TRAINER = frozenset({Role.TRAINER})
_OPERATOR = frozenset({Role.OPERATOR})
_PRODUCER = frozenset({Role.PRODUCER})
_SANDBOX_CLIENT = frozenset({Role.SANDBOX_CLIENT})

_QUEUE = {
    "EnqueueTasks": _TRAINER,
    "OpenTask": _PRODUCER,
    "LeaseTasks": _ROLLOUT,
    "Extend": _ROLLOUT | _PRODUCER,
    "Push": _ROLLOUT | _PRODUCER,
    "Return": _ROLLOUT,
    "Fail": _ROLLOUT | _PRODUCER,
    "LeaseBatch": _TRAINER,
    "Commit": _TRAINER,
    "Release": _TRAINER,
    "Checkpointed": _TRAINER,
    "Resume": _TRAINER,
    "Status": EVERY_ROLE - _SANDBOX_CLIENT,
    "SetBudget": _OPERATOR,
    "Pause": _OPERATOR,
    # A trainer that has finished ends its run.
    "Drain": _OPERATOR | _TRAINER,
    "Inspect": _OPERATOR,
    "ListDead": _OPERATOR,
    "Requeue": _OPERATOR,
    "ListAudit": _OPERATOR,
}
_WEIGHTS = {
    "Subscribe": _ROLLOUT,
    "GetManifest": _ROLLOUT,
    "Fetch": _ROLLOUT,
    "Report": _ROLLOUT,
    "Reparent": _ROLLOUT,
    "ListNodes": _OPERATOR,
}
_SANDBOX = {"Work": _ROLLOUT | _SANDBOX_CLIENT}
_TABLE = {
    **{f"/leeway.v1.TrajectoryQueue/{name}": roles for name, roles in _QUEUE.items()},
    **{f"/leeway.v1.WeightBroadcast/{name}": roles for name, roles in _WEIGHTS.items()},
    **{f"/leeway.v1.Sandbox/{name}": roles for name, roles in _SANDBOX.items()},
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR,
}


def may_call(method: str) -> frozenset[Role]:
    """The roles that may call `/package.Service/Method`."""
    return _TABLE.get(method, frozenset())


def roles_of(names: Iterable[str]) -> frozenset[Role]:
    """The roles that a certificate's alternative names give."""
    uris = (urlsplit(name) for name in names if name.startswith("spiffe://leeway/"))
    known = {role.value: role for role in Role}
    return frozenset(known[uri.path[1:]] for uri in uris if uri.path[1:] in known)
