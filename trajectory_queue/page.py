"""The queue's page over HTTP: read-only, in threads of its own, so that nothing waits for it.

Guarded as the other ends are. On loopback it is open, to callers that ask for it by a loopback
name: a web page elsewhere cannot make a browser read it. Off loopback it takes the operator's
token: the link of `leeway page run.yaml` carries a signed one, valid once and for a minute, which
opens a session. There it speaks TLS, if there is `security.certificate`.
"""

from __future__ import annotations

import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import structlog

from leeway.config import SecurityConfig
from leeway.errors import ConfigError
from leeway.guard import REFUSED
from leeway.roles import Role
from leeway.rpc import client_keys, is_loopback, server_keys
from leeway.tokens import Signer, TokenError, Verifier
from trajectory_queue import page_html
from trajectory_queue.history import History

log = structlog.get_logger(__name__)

AUDIENCE = "/leeway.v1.TrajectoryQueue/Page"
"""What a link's token is signed for."""
SESSION_SECONDS = 12 * 3600.0
_MOST_SESSIONS = 1000
_REQUEST_SECONDS = 10.0
_COOKIE = "leeway-page"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@contextmanager
def serving(address: str, security: SecurityConfig, run: str, history: History) -> Iterator[str]:
    """Serves the page while the context lasts; yields its URL.

    Raises:
        ConfigError: the address is not loopback and there are no tokens, or it cannot be bound.
    """
    keys = None if is_loopback(address) else server_keys(security)
    if keys is None and not is_loopback(address):
        raise ConfigError(
            f"queue.page_address = {address!r}: not loopback, and a browser shows tokens, not "
            "certificates; set security.accepted_tokens or security.token, or bind to 127.0.0.1 "
            "and forward the port"
        )
    sessions = Sessions(Verifier(keys)) if keys is not None else None
    host, _, port = address.rpartition(":")
    try:
        server = _Server((host.strip("[]"), int(port)), _handler(run, history, sessions))
    except (OSError, ValueError) as error:
        raise ConfigError(f"queue.page_address = {address!r}: {error}") from error
    scheme = "http"
    if keys is not None and security.certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(security.certificate, security.key)
        # The handshake is the handler's, in its thread.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        scheme = "https"
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True, name="page")
    thread.start()
    try:
        yield f"{scheme}://{host}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def link(address: str, security: SecurityConfig) -> str:
    """What an operator opens in a browser to see the page that is served at `address`.

    Raises:
        ConfigError: it is not on loopback, and there is no key to sign a token with.
    """
    if is_loopback(address):
        return f"http://{address}/"
    keys = client_keys(security)
    if keys is None:
        raise ConfigError(
            "security.token_file: give the operator's, which the page asks for off loopback"
        )
    scheme = "http" if security.authority is None else "https"
    return f"{scheme}://{address}/?token={Signer(keys).token(AUDIENCE)}"


class Sessions:
    """Who has come with a good token. Safe to use from any thread."""

    def __init__(self, verifier: Verifier, now: Callable[[], float] = time.monotonic) -> None:
        self._verifier = verifier
        self._now = now
        self._lock = threading.Lock()
        self._ends: dict[str, float] = {}

    def open(self, token: str) -> str:
        """A new session's name.

        Raises:
            TokenError: the token is not an operator's, or not for the page.
        """
        with self._lock:
            if Role.OPERATOR not in self._verifier.verify(token, AUDIENCE):
                raise TokenError("not an operator's")
            now = self._now()
            self._ends = {name: end for name, end in self._ends.items() if end > now}
            while len(self._ends) >= _MOST_SESSIONS:
                del self._ends[next(iter(self._ends))]
            name = secrets.token_urlsafe(24)
            self._ends[name] = now + SESSION_SECONDS
            return name

    def knows(self, name: str) -> bool:
        with self._lock:
            return self._ends.get(name, 0.0) > self._now()


class _Server(ThreadingHTTPServer):
    daemon_threads = True


def _handler(run: str, history: History, sessions: Sessions | None) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS
        server_version, sys_version = "leeway", ""

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if sessions is None:
                if not is_loopback(self.headers.get("Host", "").rpartition(":")[0] + ":0"):
                    self._refuse(HTTPStatus.FORBIDDEN, "ask for it by a loopback name")
                    return
            elif "token" in (query := parse_qs(url.query)):
                self._begin(sessions, query["token"][0])
                return
            elif not sessions.knows(self._session()):
                why = "open the link that `leeway page run.yaml` prints"
                self._refuse(HTTPStatus.UNAUTHORIZED, why)
                return
            if url.path == "/":
                self._send(page_html.page(run, history.view()))
            elif url.path == "/live":
                self._send(page_html.live(history.view()))
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "there is / alone")

        def _begin(self, sessions: Sessions, token: str) -> None:
            try:
                name = sessions.open(token)
            except TokenError as error:
                REFUSED.labels("token").inc()
                log.warning("page refused", peer=self.client_address[0], detail=str(error))
                self._refuse(HTTPStatus.UNAUTHORIZED, "the link is used, late or not an operator's")
                return
            secure = "; Secure" if isinstance(self.connection, ssl.SSLSocket) else ""
            self.send_response(HTTPStatus.SEE_OTHER)
            self.send_header("Location", "./")
            self.send_header(
                "Set-Cookie",
                f"{_COOKIE}={name}; Path=/; HttpOnly; SameSite=Strict{secure}; "
                f"Max-Age={SESSION_SECONDS:.0f}",
            )
            self.send_header("Referrer-Policy", "no-referrer")
            self.end_headers()

        def _session(self) -> str:
            try:
                cookie = SimpleCookie(self.headers.get("Cookie", ""))
            except CookieError:
                return ""
            return cookie[_COOKIE].value if _COOKIE in cookie else ""

        def _refuse(self, status: HTTPStatus, why: str) -> None:
            self._send(f"{status.value}: {why}\n", status, "text/plain")

        def _send(
            self, text: str, status: HTTPStatus = HTTPStatus.OK, kind: str = "text/html"
        ) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A page's requests are no news."""

    return Handler
