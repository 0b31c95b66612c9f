"""Certificates in files, as users have them."""

from __future__ import annotations

from pathlib import Path

from hvdgloo._net import tls


def authority(folder: Path, name: str) -> tuple[str, str]:
    """The paths of a new certificate and of its key; it is its own authority."""
    pem, _ = tls._make_certificate()
    text = pem.decode()
    at = text.index("-----BEGIN CERTIFICATE")
    (folder / f"{name}.key").write_text(text[:at])
    (folder / f"{name}.pem").write_text(text[at:])
    return str(folder / f"{name}.pem"), str(folder / f"{name}.key")
