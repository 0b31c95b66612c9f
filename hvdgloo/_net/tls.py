"""TLS for the connections of a job: encryption by a well-kept library, identity by the job's secret.

Each listener has a certificate: the user's, or one that is made for the process in memory. A certificate of our own
says nothing about its owner, and need not: what is signed under the job's secret at the beginning of a connection (the
handshake of the control plane, the requests and answers of the rendezvous) covers the fingerprint of the certificate
that each side has seen. An attacker in the middle has another certificate, with another fingerprint, and both sides
notice it before anything of value is sent. With a certificate authority of the user's, the certificate must be signed
by that one, too.

``ssl`` and ``cryptography`` are imported only where TLS is switched on.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.util
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hvdgloo._net.cancelling import TURN
from hvdgloo.errors import AuthenticationError, ConfigError, MissingDependencyError

if TYPE_CHECKING:
    import ssl

_MOST_AT_ONCE = 1 << 14
"""Bytes of one TLS record."""

TLS_HELLO = b"\x16\x03"
"""The first byte of a client that uses TLS."""

_NO_TLS = "it does not use TLS, and HVDGLOO_TLS=required must be set for every process of a job"


class Tls:
    """This process's part in TLS.

    Args:
        certificate: file with the certificate (and further ones up to the authority's) that this process shows when it
            listens, in PEM; empty to have one made.
        key: file with the certificate's private key; empty if ``certificate`` holds it.
        authority: file with certificates, one of which must have signed a listener's; empty for any.
    """

    def __init__(self, certificate: str = "", key: str = "", authority: str = "") -> None:
        self._certificate = certificate
        self._key = key
        self._authority = authority

    def check_listener(self) -> None:
        """Find out, without making a certificate, whether this process can listen.

        Raises:
            ConfigError: files are given that cannot be used, or do not go together.
            MissingDependencyError: there is no certificate, and the package that makes one is not installed.
        """
        if self._certificate:
            self._load()
            return
        if self._key or self._authority:
            given = "HVDGLOO_TLS_KEY" if self._key else "HVDGLOO_TLS_CA"
            raise ConfigError(f"{given} is set without HVDGLOO_TLS_CERT, the certificate that servers present")
        if importlib.util.find_spec("cryptography") is None:
            raise MissingDependencyError(
                "HVDGLOO_TLS=required needs the package cryptography to make certificates: pip install 'hvdgloo[tls]', "
                "or provide your own certificate (HVDGLOO_TLS_CERT, HVDGLOO_TLS_KEY)"
            )

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate that this process shows. Raises as ``accepted`` does."""
        return self._listener[1]

    def accepted(self, sock: socket.socket) -> TlsConnection:
        """Return the listening side of an accepted, non-blocking connection; ``shake_hands`` comes next.

        Raises:
            ConfigError: the files cannot be used.
            MissingDependencyError: see ``check_listener``.
        """
        context, _ = self._listener
        return _wrapped(context, sock, server_side=True)

    def connected(
        self, sock: socket.socket, deadline: float, check: Callable[[], None] | None = None
    ) -> tuple[TlsConnection, bytes]:
        """Return the encrypted connection to a listener, and the SHA-256 of the certificate that it has shown.

        Args:
            deadline: on the monotonic clock.
            check: called now and then; raises whatever is to end the wait.

        Raises:
            AuthenticationError: the listener does not speak TLS, or has the wrong certificate.
            ConfigError: the authority's file cannot be used.
            OSError: the connection broke, or the deadline passed.
        """
        import ssl

        connection = _wrapped(self._caller, sock, server_side=False)
        try:
            while True:
                left = max(0.001, deadline - time.monotonic())
                connection.settimeout(left if check is None else min(left, TURN))
                try:
                    connection.do_handshake()
                    break
                except TimeoutError:
                    if time.monotonic() >= deadline or check is None:
                        raise
                    check()
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise AuthenticationError(
                f"its certificate is not signed by HVDGLOO_TLS_CA: {error.verify_message}"
            ) from None
        except (ssl.SSLEOFError, ConnectionResetError) as error:
            connection.close()
            raise ConnectionError(f"{_NO_TLS}, or it has just ended ({_text(error)})") from None
        except ssl.SSLError as error:
            connection.close()
            raise AuthenticationError(f"{_NO_TLS} ({_text(error)})") from None
        except BaseException:
            connection.close()
            raise
        certificate = connection.getpeercert(binary_form=True)
        assert certificate is not None
        return connection, hashlib.sha256(certificate).digest()

    @functools.cached_property
    def _listener(self) -> tuple[ssl.SSLContext, bytes]:
        self.check_listener()
        return self._load() if self._certificate else self._make()

    @staticmethod
    def _make() -> tuple[ssl.SSLContext, bytes]:
        context = _listening_context()
        pem, fingerprint = _make_certificate()
        with _in_a_file(pem) as path:
            context.load_cert_chain(path)
        return context, fingerprint

    def _load(self) -> tuple[ssl.SSLContext, bytes]:
        import ssl

        context = _listening_context()
        if self._authority:
            _ = self._caller  # all files, so that none is a surprise later
        try:
            context.load_cert_chain(self._certificate, self._key or None, password=_no_password)
            with open(self._certificate, encoding="ascii") as file:
                text = file.read()
            first = text[text.index("-----BEGIN CERTIFICATE") : text.index("-----END CERTIFICATE-----") + 25]
            return context, hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest()
        except (OSError, ValueError) as error:
            files = " and ".join(filter(None, (self._certificate, self._key)))
            raise ConfigError(f"HVDGLOO_TLS_CERT, HVDGLOO_TLS_KEY: {files} cannot be used: {_text(error)}") from None

    @functools.cached_property
    def _caller(self) -> ssl.SSLContext:
        import ssl

        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # the secret says who it is, not a name
        if not self._authority:
            context.verify_mode = ssl.CERT_NONE  # any certificate, whose fingerprint is then checked under the secret
            return context
        try:
            context.load_verify_locations(self._authority)
        except (OSError, ValueError) as error:
            raise ConfigError(f"HVDGLOO_TLS_CA={self._authority} cannot be used: {_text(error)}") from None
        return context


if TYPE_CHECKING:
    TlsConnection = ssl.SSLSocket
"""An encrypted socket for selectors: where an SSLSocket has errors of its own, it raises BlockingIOError."""


def shake_hands(sock: TlsConnection) -> bool:
    """Go on with the handshake of a non-blocking connection that was ``accepted``; False if the other side is to speak.

    Raises:
        OSError: it failed.
    """
    import ssl

    try:
        sock.do_handshake()
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return False
    return True


def pending(sock: socket.socket) -> bytes:
    """Return the bytes that an encrypted connection has already read and decrypted: no selector announces them."""
    count = getattr(sock, "pending", int)()
    return sock.recv(count) if count else b""


def _context(protocol: int) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = _connection_class()
    return context


def _listening_context() -> ssl.SSLContext:
    import ssl

    context = _context(ssl.PROTOCOL_TLS_SERVER)
    # Tickets arrive when no thread reads, and a check whether the connection is idle would take them for its end.
    context.num_tickets = 0
    return context


@functools.cache
def _connection_class() -> Any:
    import ssl

    class Connection(ssl.SSLSocket):
        def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
            if flags:  # a look at whether there is anything
                return socket.socket.recv(self, buflen, flags)
            try:
                return super().recv(buflen)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

        def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
            try:
                return super().recv_into(buffer, nbytes, flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

        def send(self, data: Any, flags: int = 0) -> int:
            # A record at a time: one that could not be sent at once must be tried again with no fewer bytes.
            with memoryview(data) as view, view.cast("B") as octets, octets[:_MOST_AT_ONCE] as piece:
                try:
                    return super().send(piece, flags)
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    raise BlockingIOError from None

        def shutdown(self, how: int) -> None:
            socket.socket.shutdown(self, how)  # ssl's own would go on in the clear

    return Connection


def _wrapped(context: ssl.SSLContext, sock: socket.socket, *, server_side: bool) -> TlsConnection:
    return context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)


def _no_password() -> str:
    """Instead of OpenSSL's own way to get a key's password, which is to ask on the terminal and wait."""
    raise ValueError("the private key is encrypted, and there is no way to ask for its password")


def _make_certificate() -> tuple[bytes, bytes]:
    """Return a new certificate with its key in PEM, and its SHA-256."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hvdgloo job")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of hosts differ, and no side checks: it is worth as much as the signatures that name its fingerprint.
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc))
        .not_valid_after(datetime.datetime(9999, 12, 31, tzinfo=datetime.timezone.utc))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM), certificate.fingerprint(hashes.SHA256())


@contextmanager
def _in_a_file(data: bytes) -> Iterator[str]:
    """Make a file with these bytes, in memory where possible, and return its path: OpenSSL reads from paths only."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hvdgloo-tls", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, data)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile() as file:  # its mode is 0600
        file.write(data)
        file.flush()
        yield file.name


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(getattr(error, "reason", None) or error.strerror or error)
    return str(error)
