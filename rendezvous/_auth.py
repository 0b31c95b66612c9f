"""Signatures under the job's secret, on requests, answers and payloads. Pure: values in, values out.

Each purpose has a key of its own, derived from the secret, so that nothing signed for one can serve for another.

**Requests** carry one header::

    Authorization: HVDGLOO-HMAC-SHA256 run=<hex>, client=<hex>, counter=<n>, digest=<hex>, signature=<hex>

The signature covers the method, the request target as it was sent (path and query), the digest of the body, the
server's run id, the client's id and the counter. It can be checked before a byte of the body is read; the digest is
checked afterwards. Three things make a recorded request useless: the run id ties it to one life of one server, the
client id and counter tie it to one place in a sliding window that the server keeps for each client (concurrent requests
overtake each other, hence a window rather than a single number). No clock is involved.

The hello is the exception. It asks for the run id, so it cannot carry it, and a hello recorded in an earlier run of a
server with the same secret is as good as a new one. So it is made worthless: it has no body, what the server keeps of
it is bounded, and it does not count as a sign of life of its client; a client that sends nothing but a hello is a
stranger, whose connection is closed after a few seconds. Within one run its counter is checked, too.

Where connections are encrypted, all signatures cover the server's certificate, too, and nothing but a hello is sent
before an answer has confirmed that certificate.

**Answers** carry ``X-Hvdgloo-Signature``, over the run id, the client id and counter of the request, the status and the
digest of the body. So an answer fits one request only, and a client learns the run id safely: its first request, the
hello, is signed for the empty run id and gives nothing away; the answer is signed for exactly that client and counter.

**Sealed payloads** (``seal``, ``unseal``) carry pickled objects over any other plane: the tag is checked before
anything is unpickled, and the context says what the payload is for, so that it cannot be passed off as another one.

**The status token** reads the job's state (status, metrics, page) and does nothing else. **The control token** may also
have steps traced, where that is allowed. Both are derived from the secret, which cannot be derived from them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from hvdgloo._net.proofs import derive
from hvdgloo.errors import AuthenticationError

SCHEME = "HVDGLOO-HMAC-SHA256"
ANSWER_HEADER = "X-Hvdgloo-Signature"
SECRET_BYTES = 32
WINDOW = 4096
SEAL_BYTES = 32
"""Length of the tag that ``seal`` puts before a payload."""
_MAX_COUNTER = 2**53
_CREDENTIALS = re.compile(
    SCHEME + r" run=([0-9a-f]{32})?, client=([0-9a-f]{32}), counter=([0-9]{1,16}), "
    r"digest=([0-9a-f]{64}), signature=([0-9a-f]{64})"
)


def generate_secret() -> bytes:
    """Generate a job secret: 32 random bytes."""
    return secrets.token_bytes(SECRET_BYTES)


def generate_id() -> str:
    """Generate a run id or client id: 128 random bits in hexadecimal digits."""
    return secrets.token_hex(16)


def status_token(secret: bytes) -> str:
    """Return the bearer token that reads the job's state: 32 hexadecimal digits."""
    return derive(secret, "status token").hex()[:32]


def control_token(secret: bytes) -> str:
    """Return the bearer token that reads the job's page and may have steps traced, where that is allowed: 32 digits."""
    return derive(secret, "control token").hex()[:32]


def digest(body: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of a body, in hexadecimal digits."""
    return hashlib.sha256(body).hexdigest()


@dataclass(frozen=True)
class Credentials:
    """Contents of a request's Authorization header.

    Attributes:
        run: the server's run id; empty in a hello.
        client: id of the client.
        counter: counter of the request, unique for its client.
        digest: SHA-256 of the body, as the client claims.
        signature: signature over all of these and the request line.
    """

    run: str
    client: str
    counter: int
    digest: str
    signature: str

    def header(self) -> str:
        return (
            f"{SCHEME} run={self.run}, client={self.client}, counter={self.counter}, "
            f"digest={self.digest}, signature={self.signature}"
        )

    @classmethod
    def parse(cls, header: str) -> Credentials:
        """Read an Authorization header.

        Raises:
            AuthenticationError: it is missing or malformed.
        """
        match = _CREDENTIALS.fullmatch(header)
        if match is None:
            raise AuthenticationError(
                f"the Authorization header is not a {SCHEME} signature" if header else "the request is not signed"
            )
        run, client, counter, body_digest, signature = match.groups()
        return cls(run or "", client, int(counter), body_digest, signature)


class Signer:
    """Signs and verifies requests and answers under one job secret. Immutable; any thread may use it.

    Args:
        secret: the job's secret.
        channel: SHA-256 of the server's certificate, so that a man in the middle, whose certificate differs, cannot
            pass on anything signed; empty if nothing is encrypted.
    """

    def __init__(self, secret: bytes, channel: bytes = b"") -> None:
        self._channel = (channel.hex(),) if channel else ()
        self._request_key = derive(secret, "request")
        self._answer_key = derive(secret, "answer")

    def sign(self, method: str, target: str, body_digest: str, run: str, client: str, counter: int) -> Credentials:
        signature = self._request(method, target, body_digest, run, client, counter)
        return Credentials(run, client, counter, body_digest, signature)

    def verify(self, method: str, target: str, credentials: Credentials) -> None:
        """Check a request's signature; the body may still be unread.

        Raises:
            AuthenticationError: it was made with another secret, or for another request.
        """
        c = credentials
        expected = self._request(method, target, c.digest, c.run, c.client, c.counter)
        if not hmac.compare_digest(expected, c.signature):
            raise AuthenticationError(
                "the signature is wrong: the secret is another one, or the request was changed on its way"
            )

    def sign_answer(self, run: str, client: str, counter: int, status: int, body_digest: str) -> str:
        """Return the value of an answer's ``X-Hvdgloo-Signature``."""
        return self._mac(self._answer_key, run, client, str(counter), str(status), body_digest, *self._channel)

    def verify_answer(self, signature: str, run: str, client: str, counter: int, status: int, body_digest: str) -> bool:
        """Return whether an answer is the server's own, for this request."""
        expected = self.sign_answer(run, client, counter, status, body_digest)
        return hmac.compare_digest(expected.encode(), signature.encode("latin-1", "replace"))

    def _request(self, method: str, target: str, body_digest: str, run: str, client: str, counter: int) -> str:
        return self._mac(self._request_key, method, target, body_digest, run, client, str(counter), *self._channel)

    @staticmethod
    def _mac(key: bytes, *parts: str) -> str:
        # No part holds a line break (a request line cannot), so two lists of parts never give the same text.
        return hmac.digest(key, "\n".join(parts).encode("utf-8", "surrogateescape"), "sha256").hex()


class ReplayWindow:
    """The counters that one client has used: the highest, and which of the ``WINDOW`` below it. Its owner locks it."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0  # bit i: the counter ``highest - i`` was used

    def use(self, counter: int) -> bool:
        """Take a counter; return False if it was used before, or is too old to tell."""
        if counter > _MAX_COUNTER:
            return False
        ahead = counter - self._highest
        if ahead > 0:
            self._seen = ((self._seen << ahead) | 1) & ((1 << WINDOW) - 1) if ahead < WINDOW else 1
            self._highest = counter
            return True
        bit = 1 << -ahead
        if -ahead >= WINDOW or self._seen & bit:
            return False
        self._seen |= bit
        return True


def bearer_matches(header: str, token: str) -> bool:
    """Return whether an Authorization header carries a token: as ``Bearer``, or as the password of ``Basic``.

    Browsers cannot send the first, and ask for the second by themselves; the user name does not matter.
    """
    kind, _, value = header.partition(" ")
    if kind.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return False
    elif kind.lower() != "bearer":
        return False
    return hmac.compare_digest(value.strip().encode("utf-8", "surrogateescape"), token.encode())


def seal(secret: bytes, payload: bytes, context: bytes | str) -> bytes:
    """Put a tag before ``payload`` that proves knowledge of ``secret``.

    Args:
        secret: the job's secret.
        payload: bytes, e.g. a pickled object.
        context: purpose of the payload, e.g. ``"result of rank 3"``; ``unseal`` needs the same.

    Returns:
        32 bytes of tag, then the payload.
    """
    return _tag(secret, payload, context) + payload


def unseal(secret: bytes, sealed: bytes | bytearray | memoryview, context: bytes | str) -> bytes:
    """Return the payload of ``seal(secret, payload, context)``, after checking its tag.

    Raises:
        AuthenticationError: the secret or the context is another one, or bytes were changed.
    """
    sealed = bytes(sealed)
    tag, payload = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
    if len(tag) != SEAL_BYTES or not hmac.compare_digest(tag, _tag(secret, payload, context)):
        shown = context if isinstance(context, str) else context.decode("utf-8", "replace")
        raise AuthenticationError(
            f"a payload ({shown}) does not carry this job's signature, so it was not unpickled: "
            "it comes from another job, or was changed on its way"
        )
    return payload


def _tag(secret: bytes, payload: bytes, context: bytes | str) -> bytes:
    label = context.encode() if isinstance(context, str) else context
    tag = hmac.new(derive(secret, "seal"), len(label).to_bytes(8, "big") + label, "sha256")
    tag.update(payload)
    return tag.digest()
