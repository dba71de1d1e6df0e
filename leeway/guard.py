"""Who calls, and may they: the interceptors on both ends of every call.

The client's adds a fresh token. The server's asks the certificate, the token, or both, which roles
they give, and refuses, logs and counts a call that none of them may make, or a message that is too
large. (gRPC drops one of more than `CORE_LIMIT` times the size without a word to this process.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import grpc
import structlog
from prometheus_client import Counter

from leeway.roles import EVERY_ROLE, HEALTH, Role, may_call, roles_of
from leeway.tokens import Signer, TokenError, Verifier

log = structlog.get_logger(__name__)

REFUSED = Counter("leeway_rpc_refused_total", "Calls that were refused, by why", ["reason"])
CALLER: ContextVar[frozenset[Role]] = ContextVar("CALLER", default=EVERY_ROLE)
"""The roles of whoever makes the call that is being answered."""
CORE_LIMIT = 2
_BEARER = "Bearer "


class _SendToken:
    """Adds a bearer token to every call."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    async def _send(self, continuation: Any, details: Any, request: Any) -> Any:
        method = details.method
        token = self._signer.token(method.decode() if isinstance(method, bytes) else method)
        header = ("authorization", _BEARER + token)
        metadata = grpc.aio.Metadata(*(details.metadata or ()), header)
        return await continuation(details._replace(metadata=metadata), request)


class _SendTokenUnaryUnary(_SendToken, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary = _SendToken._send


class _SendTokenUnaryStream(_SendToken, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream = _SendToken._send


class _SendTokenStreamUnary(_SendToken, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary = _SendToken._send


class _SendTokenStreamStream(_SendToken, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream = _SendToken._send


# grpc.aio registers an interceptor for one kind of call only, whatever it inherits from.
_KINDS = (
    _SendTokenUnaryUnary,
    _SendTokenUnaryStream,
    _SendTokenStreamUnary,
    _SendTokenStreamStream,
)


def send_tokens(signer: Signer) -> list[grpc.aio.ClientInterceptor]:
    return [kind(signer) for kind in _KINDS]


class Guard(grpc.aio.ServerInterceptor):
    """Lets a call through if every proof that the server asks for allows it.

    Args:
        verifier: Where set, every call needs a token.
        certificates: Clients show a certificate, which names a role.
        max_message_bytes: Of one request.
    """

    def __init__(
        self, verifier: Verifier | None, certificates: bool, max_message_bytes: int
    ) -> None:
        self._verifier = verifier
        self._certificates = certificates
        self._max_message_bytes = max_message_bytes

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(HEALTH):
            return handler
        return _checked(handler, self, details.method)

    async def check(self, method: str, context: Any) -> None:
        """Aborts a call that is not allowed."""
        roles = EVERY_ROLE
        if self._certificates:
            names = context.auth_context().get("x509_subject_alternative_name", ())
            roles = roles_of(name.decode(errors="replace") for name in names)
        if self._verifier is not None:
            try:
                roles &= self._roles_of_token(self._verifier, method, context)
            except TokenError as error:
                _log(method, context, "token", str(error))
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token")
        if not roles & may_call(method):
            wanted = ", ".join(sorted(may_call(method))) or "nobody"
            _log(method, context, "role", f"for {wanted}; came {', '.join(sorted(roles))}")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{method} is for: {wanted}")
        CALLER.set(roles)

    async def check_size(self, message: bytes, method: str, context: Any) -> None:
        """Aborts the call if the message is too large."""
        if len(message) > self._max_message_bytes:
            why = f"message of {len(message)} bytes, at most {self._max_message_bytes} may come"
            _log(method, context, "size", why)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)

    def _roles_of_token(self, verifier: Verifier, method: str, context: Any) -> frozenset[Role]:
        given = dict(context.invocation_metadata()).get("authorization", "")
        if not isinstance(given, str) or not given.startswith(_BEARER):
            raise TokenError("missing")
        return verifier.verify(given.removeprefix(_BEARER), method)


def _log(method: str, context: Any, reason: str, detail: str) -> None:
    REFUSED.labels(reason).inc()
    log.warning("call refused", method=method, peer=context.peer(), reason=reason, detail=detail)


def _checked(handler: Any, guard: Guard, method: str) -> Any:
    """The same handler behind the guard; it gets its messages once they are found small enough."""
    kinds = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    behaviour, make = kinds[handler.request_streaming, handler.response_streaming]

    async def admitted(request: Any, context: Any) -> Any:
        await guard.check(method, context)
        if handler.request_streaming:
            return messages(request, context)
        await guard.check_size(request, method, context)
        return handler.request_deserializer(request)

    async def messages(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for message in requests:
            await guard.check_size(message, method, context)
            yield handler.request_deserializer(message)

    async def answer(request: Any, context: Any) -> Any:
        return await behaviour(await admitted(request, context), context)

    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(behaviour(await admitted(request, context), context)) as stream:
            async for message in stream:
                yield message

    checked = answers if handler.response_streaming else answer
    return make(checked, None, handler.response_serializer)
