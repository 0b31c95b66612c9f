"""Signatures: what is covered, what is refused, and that nothing is looked into before."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo._net.proofs import derive
from hvdgloo.errors import AuthenticationError
from hvdgloo.rendezvous import _auth as auth
from hvdgloo.rendezvous import generate_secret, seal, unseal

SECRET = bytes(range(32))
SIGNER = auth.Signer(SECRET)
RUN, CLIENT = "a" * 32, "b" * 32


def signed(**changes: Any) -> auth.Credentials:
    arguments = {"body_digest": auth.digest(b"body"), "run": RUN, "client": CLIENT, "counter": 7} | changes
    return SIGNER.sign("PUT", "/v1/kv/s/k?timeout=1", **arguments)


def test_a_signed_request_is_accepted() -> None:
    SIGNER.verify("PUT", "/v1/kv/s/k?timeout=1", auth.Credentials.parse(signed().header()))


def test_a_hello_is_signed_for_the_empty_run() -> None:
    assert auth.Credentials.parse(signed(run="").header()).run == ""


@pytest.mark.parametrize(
    ("method", "target"),
    [("GET", "/v1/kv/s/k?timeout=1"), ("PUT", "/v1/kv/s/K?timeout=1"), ("PUT", "/v1/kv/s/k?timeout=2"), ("PUT", "/")],
)
def test_another_method_or_target_is_refused(method: str, target: str) -> None:
    with pytest.raises(AuthenticationError, match="signature is wrong"):
        SIGNER.verify(method, target, signed())


@pytest.mark.parametrize("field", ["run", "client", "counter", "digest", "signature"])
def test_every_field_is_covered(field: str) -> None:
    good = signed()
    other = {"run": "c" * 32, "client": "c" * 32, "counter": 8, "digest": auth.digest(b"x"), "signature": "0" * 64}
    changed = auth.Credentials(**{**good.__dict__, field: other[field]})
    with pytest.raises(AuthenticationError):
        SIGNER.verify("PUT", "/v1/kv/s/k?timeout=1", changed)


def test_another_secret_is_refused_and_no_secret_is_shown() -> None:
    with pytest.raises(AuthenticationError) as caught:
        auth.Signer(generate_secret()).verify("PUT", "/v1/kv/s/k?timeout=1", signed())
    assert SECRET.hex() not in str(caught.value)


@given(st.text(max_size=300))
def test_any_other_header_is_refused(header: str) -> None:
    with pytest.raises(AuthenticationError):
        auth.Credentials.parse(header)


@pytest.mark.parametrize("tail", [" ", ", more=1", "\n"])
def test_a_header_with_something_behind_it_is_refused(tail: str) -> None:
    with pytest.raises(AuthenticationError):
        auth.Credentials.parse(signed().header() + tail)


def test_an_answer_fits_one_request_only() -> None:
    signature = SIGNER.sign_answer(RUN, CLIENT, 7, 200, auth.digest(b"answer"))
    good = (RUN, CLIENT, 7, 200, auth.digest(b"answer"))
    assert SIGNER.verify_answer(signature, *good)
    for changed in [
        ("c" * 32, CLIENT, 7, 200, good[4]),
        (RUN, "c" * 32, 7, 200, good[4]),
        (RUN, CLIENT, 8, 200, good[4]),
        (RUN, CLIENT, 7, 404, good[4]),
        (RUN, CLIENT, 7, 200, auth.digest(b"another")),
    ]:
        assert not SIGNER.verify_answer(signature, *changed)
    assert not SIGNER.verify_answer("ÿ", *good)


def test_keys_differ_by_purpose() -> None:
    keys = {derive(SECRET, purpose) for purpose in ("request", "answer", "seal", "status token")}
    assert len(keys) == 4
    assert SECRET not in keys
    assert auth.status_token(SECRET) != auth.status_token(generate_secret())


class TestReplayWindow:
    def test_each_counter_serves_once(self) -> None:
        window = auth.ReplayWindow()
        assert [window.use(counter) for counter in (0, 0, 5, 3, 5, 3, 4)] == [
            True,
            False,
            True,
            True,
            False,
            False,
            True,
        ]

    def test_too_old_is_refused(self) -> None:
        window = auth.ReplayWindow()
        assert window.use(auth.WINDOW)
        assert not window.use(0)
        assert window.use(1)

    def test_a_jump_forgets_nothing(self) -> None:
        window = auth.ReplayWindow()
        assert window.use(3)
        assert window.use(10 * auth.WINDOW)
        assert not window.use(3)
        assert not window.use(10 * auth.WINDOW)

    def test_absurd_counters_do_not_move_the_window(self) -> None:
        window = auth.ReplayWindow()
        assert not window.use(2**60)
        assert window.use(0)

    @given(st.lists(st.integers(0, 3 * auth.WINDOW), max_size=60))
    def test_never_twice(self, counters: list[int]) -> None:
        window, used = auth.ReplayWindow(), set()
        for counter in counters:
            if window.use(counter):
                assert counter not in used
                used.add(counter)
            else:
                assert counter in used or counter <= max(used) - auth.WINDOW


@pytest.mark.parametrize(
    ("header", "good"),
    [
        ("Bearer {token}", True),
        ("bearer {token}", True),
        ("Basic " + base64.b64encode(b"user:{token}").decode(), False),
        ("Bearer wrong", False),
        ("{token}", False),
        ("Digest {token}", False),
        ("Basic ***", False),
        ("Basic /w==", False),
        ("", False),
    ],
)
def test_status_token(header: str, good: bool) -> None:
    token = auth.status_token(SECRET)
    assert auth.bearer_matches(header.format(token=token), token) is good


def test_status_token_as_password() -> None:
    token = auth.status_token(SECRET)
    assert auth.bearer_matches("Basic " + base64.b64encode(f"me:{token}".encode()).decode(), token)


class Explodes:
    """A pickle that tells when it is loaded."""

    loaded = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Explodes, "loaded", True)


def test_sealed_payloads_are_checked_before_they_are_unpickled() -> None:
    """Pain 30."""
    payload = pickle.dumps(Explodes())
    sealed = seal(SECRET, payload, "function")
    assert unseal(SECRET, sealed, "function") == payload
    assert unseal(SECRET, bytearray(sealed), b"function") == payload
    for secret, data, context in [
        (generate_secret(), sealed, "function"),
        (SECRET, sealed, "result of rank 3"),
        (SECRET, sealed, "Function"),
        (SECRET, sealed[:-1], "function"),
        (SECRET, sealed[:-1] + b"x", "function"),
        (SECRET, payload, "function"),
        (SECRET, b"", "function"),
    ]:
        with pytest.raises(AuthenticationError, match="not unpickled"):
            pickle.loads(unseal(secret, data, context))
    assert not Explodes.loaded


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_context_and_payload_do_not_run_into_each_other(context: bytes, payload: bytes) -> None:
    sealed = seal(SECRET, payload, context)
    assert unseal(SECRET, sealed, context) == payload
    if payload:
        with pytest.raises(AuthenticationError):
            unseal(SECRET, sealed[:32] + payload[1:], context + payload[:1])
