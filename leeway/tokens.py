"""Tokens: signed for one call, valid for a minute, accepted once.

A key is a line of a file that is named after the role it stands for. The first line signs, every
line verifies, and the file is read again whenever it changes: so keys rotate while all goes on. Put
the new key below the old one, everywhere; then above it; then take the old one away.

A token is a JSON Web Token (RFC 7519, HS256) for one method. The key itself never travels.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jwt
from jwt.types import Options

from leeway.errors import ConfigError
from leeway.roles import EVERY_ROLE, Role

LIFETIME_SECONDS = 60
SKEW_SECONDS = 30
"""By how much the clocks of the two sides may differ."""
SHORTEST_KEY = 32
_ALGORITHM = "HS256"
_SHARED = "shared"


class TokenError(Exception):
    """Why a token is refused. For the log; the caller is told no more than that it is."""


class Keys(Protocol):
    """The keys that a process holds, as they are now, by the name of what they stand for."""

    def __call__(self) -> Mapping[str, tuple[bytes, ...]]: ...


def shared_key(secret: str) -> Keys:
    """One key that stands for every role: both ends are one trust domain."""
    keys = {_SHARED: (_derive(secret),)}
    return lambda: keys


class KeyFiles:
    """Keys in files: of a directory, each that is named after a role; or one such file.

    Raises:
        ConfigError: when read: no file, an empty one, or a key that is too short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[tuple[str, int, int], ...] = ()
        self._keys: Mapping[str, tuple[bytes, ...]] = {}

    def __call__(self) -> Mapping[str, tuple[bytes, ...]]:
        try:
            files = self._files()
            seen = tuple((f.name, (s := f.stat()).st_mtime_ns, s.st_ino) for f in files)
            if seen != self._seen:
                self._keys = {file.name: _read(file) for file in files}
                self._seen = seen
        except OSError as error:
            raise ConfigError(f"key of tokens {error.filename}: {error.strerror}") from error
        return self._keys

    def _files(self) -> list[Path]:
        files = list(self._path.iterdir()) if self._path.is_dir() else [self._path]
        files = sorted(file for file in files if file.name in EVERY_ROLE)
        if not files:
            raise ConfigError(
                f"{self._path}: no key; expected files named {', '.join(sorted(EVERY_ROLE))}"
            )
        return files


class Signer:
    """Signs tokens with the first key there is."""

    def __init__(self, keys: Keys, now: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._now = now

    def token(self, method: str) -> str:
        name, keys = next(iter(self._keys().items()))
        issued = int(self._now())
        claims = {
            "aud": method,
            "iat": issued,
            "exp": issued + LIFETIME_SECONDS,
            "jti": secrets.token_urlsafe(12),
        }
        return jwt.encode(claims, keys[0], _ALGORITHM, headers={"kid": name})


class Verifier:
    """Verifies tokens, each once.

    It remembers the tokens of its own process: of several replicas behind one address, each would
    take a token once.
    """

    def __init__(self, keys: Keys, now: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._now = now
        self._used: set[str] = set()
        self._expiring: deque[tuple[float, str]] = deque()

    def verify(self, token: str, method: str) -> frozenset[Role]:
        """The roles that a token gives.

        Raises:
            TokenError: malformed, by an unknown key, for another method, expired, or used before.
        """
        now = self._now()
        claims, name = self._claims(token, method)
        issued, expires = float(claims["iat"]), float(claims["exp"])
        if expires + SKEW_SECONDS < now:
            raise TokenError(f"expired {now - expires:.0f} s ago")
        if issued - SKEW_SECONDS > now:
            raise TokenError(f"of the future by {issued - now:.0f} s; compare the clocks")
        if expires - issued > LIFETIME_SECONDS:
            raise TokenError("valid for too long")
        self._use(str(claims["jti"]), expires + SKEW_SECONDS, now)
        return EVERY_ROLE if name == _SHARED else frozenset({Role(name)})

    def _claims(self, token: str, method: str) -> tuple[Mapping[str, Any], str]:
        options: Options = {
            "require": ["aud", "iat", "exp", "jti"],
            # By the clock that was handed in.
            "verify_exp": False,
            "verify_iat": False,
        }
        try:
            name = str(jwt.get_unverified_header(token).get("kid"))
            refusal: jwt.PyJWTError = jwt.InvalidKeyError(f"no key for {name!r}")
            for key in self._keys().get(name, ()):
                try:
                    return jwt.decode(
                        token, key, [_ALGORITHM], audience=method, options=options
                    ), name
                except jwt.InvalidSignatureError as error:
                    refusal = error
        except jwt.PyJWTError as error:
            refusal = error
        raise TokenError(str(refusal)) from refusal

    def _use(self, identifier: str, until: float, now: float) -> None:
        while self._expiring and self._expiring[0][0] < now:
            self._used.discard(self._expiring.popleft()[1])
        if identifier in self._used:
            raise TokenError("used before")
        self._used.add(identifier)
        self._expiring.append((until, identifier))


def _read(file: Path) -> tuple[bytes, ...]:
    lines = [line.strip() for line in file.read_text().splitlines()]
    keys = [line for line in lines if line]
    if not keys:
        raise ConfigError(f"key of tokens {file}: the file is empty")
    if any(len(key) < SHORTEST_KEY for key in keys):
        raise ConfigError(
            f"key of tokens {file}: shorter than {SHORTEST_KEY} characters; make one with "
            "`openssl rand -base64 32`"
        )
    return tuple(_derive(key) for key in keys)


def _derive(key: str) -> bytes:
    return hashlib.sha256(b"leeway token\0" + key.encode()).digest()
