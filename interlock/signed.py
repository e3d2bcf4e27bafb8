"""Signed values: a domain line, then the exact canonical bytes, under Ed25519.

    {"format": "interlock/stop/v1", "payload": "<base64 of the canonical bytes>",
     "signatures": [{"key": "ed25519:0123456789abcdef", "sig": "<base64>"}]}

What is signed: ``<format>\\n`` + payload bytes. Format and key ids are checked before any signature.
A key id selects a key; it never decides whether to verify. An unknown key's signature is ignored, a bad
signature of a known key rejects the whole value. No key serves two purposes: a caller passes only the
keys that are pinned for that format. Page: docs/formats/signed-value.md.
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from interlock.canon import canonical, parse
from interlock.errors import Malformed, Untrusted

MAX_SIGNATURES = 16
STOP, RESUME, RESUME_APPROVAL = "interlock/stop/v1", "interlock/resume/v1", "interlock/resume-approval/v1"
GRANT, LEASE, SNAPSHOT = "interlock/grant/v1", "interlock/lease/v1", "interlock/snapshot/v1"
STOPS, RECEIPT, TRUST = "interlock/stops/v1", "interlock/receipt/v1", "interlock/trust/v1"
TRUST_APPROVAL, BUNDLE, MARKS = "interlock/trust-approval/v1", "interlock/bundle/v1", "interlock/marks/v1"
BREAK_GLASS = "interlock/break-glass/v1"
FORMATS = frozenset(
    {STOP, RESUME, RESUME_APPROVAL, GRANT, LEASE, SNAPSHOT, STOPS, RECEIPT, TRUST, TRUST_APPROVAL, BUNDLE,
     MARKS, BREAK_GLASS}
)


def public_bytes(key: Ed25519PublicKey) -> bytes:
    """Return the 32 raw bytes of a public key."""
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def private_bytes(key: Ed25519PrivateKey) -> bytes:
    """Return the 32 raw bytes of a private key (for a 0600 file, never for a log)."""
    return key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def key_id(key: Ed25519PublicKey | bytes) -> str:
    """Return ``ed25519:`` + the first 16 hex digits of SHA-256 over the raw public key."""
    raw = key if isinstance(key, bytes) else public_bytes(key)
    return "ed25519:" + hashlib.sha256(raw).hexdigest()[:16]


def public_text(key: Ed25519PublicKey) -> str:
    """Return the base64 text under which a public key is pinned in JSON files."""
    return base64.b64encode(public_bytes(key)).decode()


def public_from_text(text: str) -> Ed25519PublicKey:
    """Parse `public_text`; raises Malformed."""
    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error):
        raise Malformed("not an Ed25519 public key") from None


@dataclass(frozen=True)
class Signed:
    """A signed value as it travels: `payload` are the exact bytes that were signed."""

    format: str
    payload: bytes
    signatures: tuple[tuple[str, bytes], ...]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object that travels."""
        return {
            "format": self.format,
            "payload": base64.b64encode(self.payload).decode(),
            "signatures": [{"key": k, "sig": base64.b64encode(s).decode()} for k, s in self.signatures],
        }

    @classmethod
    def from_json(cls, value: object) -> "Signed":
        """Parse `as_json`; raises Malformed. No signature is looked at here."""
        if not isinstance(value, dict) or set(value) != {"format", "payload", "signatures"}:
            raise Malformed("not a signed value")
        rows = value["signatures"]
        if value["format"] not in FORMATS:
            raise Malformed("unknown format of a signed value")
        if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_SIGNATURES:
            raise Malformed("a signed value carries 1 to 16 signatures")
        try:
            signatures = tuple((str(r["key"]), base64.b64decode(r["sig"], validate=True)) for r in rows)
            payload = base64.b64decode(value["payload"], validate=True)
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise Malformed("a signed value is not base64") from None
        return cls(value["format"], payload, signatures)

    def body(self) -> dict[str, Any]:
        """Return the parsed payload WITHOUT verifying it (labels for a log line, a key choice)."""
        value = parse(self.payload)
        if not isinstance(value, dict):
            raise Malformed("a signed payload is not an object")
        return value


def sign(format_: str, body: Mapping[str, object], *keys: Ed25519PrivateKey) -> Signed:
    """Sign `body` under `format_` with each of `keys`."""
    if format_ not in FORMATS:
        raise Malformed(f"unknown format {format_}")
    payload = canonical(body)
    message = format_.encode() + b"\n" + payload
    return Signed(format_, payload, tuple((key_id(k.public_key()), k.sign(message)) for k in keys))


def add_signature(value: Signed, key: Ed25519PrivateKey) -> Signed:
    """Return `value` with one more signature over the same bytes."""
    message = value.format.encode() + b"\n" + value.payload
    extra = (key_id(key.public_key()), key.sign(message))
    return Signed(value.format, value.payload, (*value.signatures, extra))


def verify(
    value: Signed, format_: str, keys: Mapping[str, Ed25519PublicKey], *, threshold: int = 1
) -> dict[str, Any]:
    """Return the body when at least `threshold` DIFFERENT pinned keys signed it under `format_`.

    Args: `keys` key id → public key, only those pinned for this purpose. Raises Untrusted (wrong format,
    too few signatures, a bad signature of a pinned key) or Malformed.
    """
    if value.format != format_:
        raise Untrusted(f"expected {format_}, got {value.format}", code="format")
    if threshold < 1:
        raise Untrusted("a threshold below one verifies nothing", code="threshold")
    message = format_.encode() + b"\n" + value.payload
    good: set[str] = set()
    for kid, sig in value.signatures:
        key = keys.get(kid)
        if key is None:
            continue
        if key_id(key) != kid:
            raise Untrusted("a pinned key does not match its id", code="key_id")
        try:
            key.verify(sig, message)
        except InvalidSignature:
            raise Untrusted("a signature does not verify", code="signature") from None
        good.add(kid)
    if len(good) < threshold:
        raise Untrusted(
            f"{len(good)} of {threshold} needed signatures by pinned keys", code="signature",
            next_step="sign with a key that is pinned for this purpose",
        )
    return value.body()


def signers(value: Signed, keys: Mapping[str, Ed25519PublicKey]) -> frozenset[str]:
    """Return the ids of the pinned keys that signed `value` (after `verify`)."""
    return frozenset(k for k, _ in value.signatures if k in keys)
