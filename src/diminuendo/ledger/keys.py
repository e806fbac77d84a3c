"""Keys that sign records: who does not have the key can neither add a record nor rewrite one.

A key is named by where it is kept: `file:/path`, `env:NAME`, or `command:pass show ledger-key`.
A PEM private key is Ed25519: records signed with it are checked with its public key, which cannot
sign. Anything else of at least 16 bytes is a secret for HMAC-SHA256, which signs and checks.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shlex
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from diminuendo import _extras, _files
from diminuendo.errors import InputError, UsageError

VARIABLE = "DIMINUENDO_LEDGER_KEY"
_PLACES = "file:/path, env:NAME or command:a command that prints it"


class Key(ABC):
    """Something that signs the digests of records, or only checks signatures."""

    @abstractmethod
    def sign(self, digest: str) -> str:
        """The signature of a record's digest, as text."""

    @abstractmethod
    def checks(self, digest: str, signature: str) -> bool:
        """Whether the signature was made with this key for this digest."""


class HmacKey(Key):
    """HMAC-SHA256 with a secret: who can check can also sign."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, digest: str) -> str:
        """ "hmac-sha256:" and 64 hexadecimal digits."""
        return "hmac-sha256:" + hmac.new(self._secret, digest.encode(), hashlib.sha256).hexdigest()

    def checks(self, digest: str, signature: str) -> bool:
        """Compares in constant time."""
        return hmac.compare_digest(self.sign(digest), signature)


class Ed25519Key(Key):
    """Ed25519: a private key signs, its public key only checks."""

    def __init__(self, private: Any, public: Any) -> None:
        self._private, self._public = private, public

    def sign(self, digest: str) -> str:
        """ "ed25519:" and 128 hexadecimal digits."""
        if self._private is None:
            raise UsageError("This is a public key, which checks signatures and makes none.")
        return "ed25519:" + str(self._private.sign(digest.encode()).hex())

    def checks(self, digest: str, signature: str) -> bool:
        """By the public key."""
        kind, _, text = signature.partition(":")
        try:
            self._public.verify(bytes.fromhex(text), digest.encode())
        except Exception:
            return False
        return kind == "ed25519"


def load(place: str | Key | None) -> Key | None:
    """The key at a place; None without one. Raises InputError, which never shows the key."""
    if place is None or isinstance(place, Key):
        return place
    kind, _, where = place.partition(":")
    if kind == "file":
        with _files.os_errors("a readable file", name="the key", path=where):
            content = Path(where).expanduser().read_bytes()
    elif kind == "env":
        content = os.environb.get(where.encode(), b"")
    elif kind == "command":
        content = _output(where)
    else:
        raise InputError(_PLACES, name="the place of the key", value=kind)
    return _key(content.strip())


def configured() -> Key | None:
    """The key that $DIMINUENDO_LEDGER_KEY names; None without that variable."""
    return load(os.environ.get(VARIABLE) or None)


def _output(command: str) -> bytes:
    try:
        return subprocess.run(shlex.split(command), capture_output=True, check=True).stdout
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise InputError(
            "one that prints the key",
            name="the command",
            value=command,
            remedy=f"({type(error).__name__})",
        ) from None


def _key(content: bytes) -> Key:
    if content.startswith(b"-----BEGIN"):
        return _ed25519(content)
    if len(content) < 16:
        raise InputError("at least 16 bytes", name="the key", value=f"{len(content)} bytes")
    return HmacKey(content)


def _ed25519(pem: bytes) -> Key:
    with _extras.needed("cryptography", extra="keys", purpose="An Ed25519 key"):
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    try:
        if b"PRIVATE KEY" in pem:
            private = serialization.load_pem_private_key(pem, password=None)
            public = private.public_key()
        else:
            private, public = None, serialization.load_pem_public_key(pem)
    except (ValueError, TypeError):
        private = public = None
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise InputError(
            "an Ed25519 key in PEM without a password",
            name="the key",
            value="another one",
            remedy="openssl genpkey -algorithm ed25519 -out key.pem; "
            "openssl pkey -in key.pem -pubout -out key.pub",
        )
    return Ed25519Key(private, public)
