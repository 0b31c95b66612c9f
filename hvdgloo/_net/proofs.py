"""Proofs that the process at the other end of a connection knows a secret. Pure, except for the nonces.

All proofs of the library are made and checked here. The scheme is the same everywhere: each side sends a nonce, and
proves the secret by an HMAC that covers both nonces and everything else that the connection is about. So a recorded
proof is worthless in another connection. Each purpose has a key of its own, so a proof for one is worthless for
another; and each proof covers a label that names its side, so that it cannot be reflected.
"""

from __future__ import annotations

import hmac
import os

NONCE_BYTES = 16
PROOF_BYTES = 32


def derive(secret: bytes, purpose: str) -> bytes:
    """Return the key (32 bytes) for one purpose. It reveals nothing about the secret or about other keys."""
    return hmac.digest(secret, b"hvdgloo 1 key: " + purpose.encode(), "sha256")


def new_nonce() -> bytes:
    """Return ``NONCE_BYTES`` random bytes, to be used once."""
    return os.urandom(NONCE_BYTES)


def prove(key: bytes, label: str, *parts: bytes) -> bytes:
    """Return an HMAC-SHA256 (``PROOF_BYTES``) over a label and parts, each preceded by its length.

    Args:
        key: from ``derive``.
        label: the proof's role within its purpose: ``"coordinator"``.
        parts: both nonces, and what else must be the same on both sides.
    """
    text = b"".join(len(part).to_bytes(4, "big") + part for part in (label.encode(), *parts))
    return hmac.digest(key, text, "sha256")


def proves(proof: bytes, key: bytes, label: str, *parts: bytes) -> bool:
    """Tell, in constant time, whether ``proof`` is what ``prove`` returns for the same arguments."""
    return hmac.compare_digest(proof, prove(key, label, *parts))
