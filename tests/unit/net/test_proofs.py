"""Proofs of the secret: each is worth something for one key, one label and one list of parts."""

from __future__ import annotations

import itertools

from hvdgloo._net.proofs import NONCE_BYTES, PROOF_BYTES, derive, new_nonce, prove, proves

KEY = derive(b"secret", "purpose")


def test_a_proof_is_worthless_for_anything_else() -> None:
    cases = [
        (KEY, "member", b"ab", b"c"),
        (KEY, "member", b"a", b"bc"),
        (KEY, "member", b"abc"),
        (KEY, "member", b"abc", b""),
        (KEY, "member", b"", b"abc"),
        (KEY, "membera", b"b", b"c"),
        (KEY, "coordinator", b"ab", b"c"),
        (derive(b"secret", "another purpose"), "member", b"ab", b"c"),
        (derive(b"another", "purpose"), "member", b"ab", b"c"),
    ]
    for one, other in itertools.product(cases, cases):
        assert proves(prove(*one), *other) == (one is other)


def test_what_is_no_proof_proves_nothing() -> None:
    for proof in (b"", bytes(PROOF_BYTES), prove(KEY, "member")[:-1], prove(KEY, "member") + b"x"):
        assert not proves(proof, KEY, "member")
    assert len(prove(KEY, "member")) == PROOF_BYTES


def test_no_nonce_comes_twice() -> None:
    nonces = {new_nonce() for _ in range(100)}
    assert len(nonces) == 100
    assert {len(nonce) for nonce in nonces} == {NONCE_BYTES}
