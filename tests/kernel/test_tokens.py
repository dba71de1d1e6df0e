"""Tokens: signed for one call, valid for a minute, accepted once; keys rotate without a restart."""

from __future__ import annotations

from pathlib import Path

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.errors import ConfigError
from leeway.roles import EVERY_ROLE, Role
from leeway.tokens import (
    LIFETIME_SECONDS,
    SKEW_SECONDS,
    KeyFiles,
    Signer,
    TokenError,
    Verifier,
    shared_key,
)

METHOD = "/leeway.v1.TrajectoryQueue/Push"
OLD, NEW, OTHER = ("o" * 32), ("n" * 32), ("x" * 32)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def keys(directory: Path, **lines: str) -> KeyFiles:
    directory.mkdir(exist_ok=True)
    for role, text in lines.items():
        (directory / role).write_text(text)
    return KeyFiles(directory)


def test_a_token_gives_the_role_of_its_key_and_nothing_else(tmp_path: Path, clock: Clock) -> None:
    both = keys(tmp_path / "server", rollout=OLD, trainer=NEW)
    verifier = Verifier(both, clock)
    for role in (Role.ROLLOUT, Role.TRAINER):
        signer = Signer(KeyFiles(tmp_path / "server" / role), clock)
        assert verifier.verify(signer.token(METHOD), METHOD) == {role}


def test_a_token_under_a_false_name_is_refused(tmp_path: Path, clock: Clock) -> None:
    verifier = Verifier(keys(tmp_path / "server", rollout=OLD, trainer=NEW), clock)
    forger = Signer(keys(tmp_path / "forger", trainer=OLD), clock)
    with pytest.raises(TokenError, match="Signature"):
        verifier.verify(forger.token(METHOD), METHOD)
    stranger = Signer(keys(tmp_path / "stranger", operator=OTHER), clock)
    with pytest.raises(TokenError, match="no key for 'operator'"):
        verifier.verify(stranger.token(METHOD), METHOD)


def test_a_replayed_token_is_refused_as_long_as_it_would_be_valid(clock: Clock) -> None:
    verifier, signer = Verifier(shared_key("k"), clock), Signer(shared_key("k"), clock)
    token = signer.token(METHOD)
    assert verifier.verify(token, METHOD) == EVERY_ROLE
    for seconds in (0, LIFETIME_SECONDS, SKEW_SECONDS):
        clock.seconds += seconds
        with pytest.raises(TokenError, match="used before"):
            verifier.verify(token, METHOD)
    clock.seconds += 1
    with pytest.raises(TokenError, match="expired"):
        verifier.verify(token, METHOD)


def test_what_is_remembered_of_used_tokens_is_forgotten_with_them(clock: Clock) -> None:
    verifier, signer = Verifier(shared_key("k"), clock), Signer(shared_key("k"), clock)
    for _ in range(1000):
        verifier.verify(signer.token(METHOD), METHOD)
        clock.seconds += 1
    assert len(verifier._used) <= LIFETIME_SECONDS + SKEW_SECONDS + 2


@given(st.integers(-200, 200))
def test_clocks_may_differ_by_so_much(seconds: int) -> None:
    here, there = Clock(), Clock()
    there.seconds += seconds
    verifier, signer = Verifier(shared_key("k"), there), Signer(shared_key("k"), here)
    token = signer.token(METHOD)
    if -SKEW_SECONDS <= seconds <= LIFETIME_SECONDS + SKEW_SECONDS:
        verifier.verify(token, METHOD)
    else:
        with pytest.raises(TokenError, match=r"expired|future"):
            verifier.verify(token, METHOD)


def test_a_token_is_for_one_method(clock: Clock) -> None:
    verifier, signer = Verifier(shared_key("k"), clock), Signer(shared_key("k"), clock)
    with pytest.raises(TokenError, match=r"[Aa]udience"):
        verifier.verify(signer.token("/leeway.v1.TrajectoryQueue/Status"), METHOD)


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": METHOD, "iat": 1_000_000, "exp": 9_000_000, "jti": "a"},
        {"aud": METHOD, "iat": 1_000_000, "exp": 1_000_060},
        {"iat": 1_000_000, "exp": 1_000_060, "jti": "a"},
        {"aud": METHOD, "exp": 1_000_060, "jti": "a"},
    ],
)
def test_a_client_cannot_grant_itself_more(claims: dict[str, object], clock: Clock) -> None:
    (key,) = shared_key("k")()["shared"]
    token = jwt.encode(claims, key, "HS256", headers={"kid": "shared"})
    with pytest.raises(TokenError):
        Verifier(shared_key("k"), clock).verify(token, METHOD)


@pytest.mark.parametrize("token", ["", "x", "a.b.c", "Bearer", "é" * 5])
def test_what_is_no_token_is_refused(token: str, clock: Clock) -> None:
    with pytest.raises(TokenError):
        Verifier(shared_key("k"), clock).verify(token, METHOD)


def test_an_unsigned_token_is_refused(clock: Clock) -> None:
    claims = {"aud": METHOD, "iat": 1_000_000, "exp": 1_000_060, "jti": "a"}
    token = jwt.encode(claims, "", "none", headers={"kid": "shared"})
    with pytest.raises(TokenError):
        Verifier(shared_key("k"), clock).verify(token, METHOD)


def test_keys_rotate_while_both_sides_run(tmp_path: Path, clock: Clock) -> None:
    server = keys(tmp_path / "server", rollout=OLD)
    client = keys(tmp_path / "client", rollout=OLD)
    verifier, signer = Verifier(server, clock), Signer(client, clock)

    def call() -> None:
        verifier.verify(signer.token(METHOD), METHOD)

    for server_lines, client_lines in [
        (OLD, OLD),
        (f"{OLD}\n{NEW}\n", OLD),
        (f"{OLD}\n{NEW}\n", f"{NEW}\n{OLD}\n"),
        (f"{NEW}\n", f"{NEW}\n{OLD}\n"),
        (f"{NEW}\n", f"{NEW}\n"),
    ]:
        replace(tmp_path / "server" / "rollout", server_lines)
        replace(tmp_path / "client" / "rollout", client_lines)
        call()
    replace(tmp_path / "client" / "rollout", OLD)
    with pytest.raises(TokenError, match="Signature"):
        call()


def replace(file: Path, text: str) -> None:
    """As Kubernetes does it: another file takes the name."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.replace(file)


@pytest.mark.parametrize(
    ("lines", "message"),
    [({}, "no key"), ({"rollout": "\n"}, "is empty"), ({"rollout": "short"}, "shorter than 32")],
)
def test_a_wrong_key_file_is_named(tmp_path: Path, lines: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        keys(tmp_path / "keys", **lines)()


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollout"):
        KeyFiles(tmp_path / "rollout")()
