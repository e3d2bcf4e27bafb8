"""High-water marks: what each writing process of a node claims to have recorded, signed by the node key.

Body: canonical ``{"at_ms","boot_id","streams":[{"hash","seq","stream"}]}``. Signed is the domain line
``interlock/marks/v1\\n`` and the body, ECDSA P-256 with SHA-256. A stream that ends below its mark, and a
mark without a stream, are lost records, whatever the tree says.
"""

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.hashes import SHA256

from audit.leaf import check_name
from interlock.call import number, text
from interlock.canon import canonical, parse
from interlock.errors import Malformed, Untrusted
from interlock.signed import MARKS

MAX_STREAMS = 256


@dataclass(frozen=True)
class Mark:
    """One claim: the highest seq of `stream` and the digest of that record."""

    stream: str
    seq: int
    hash: str


def body(marks: list[tuple[str, int, str]], boot_id: str, at_ms: int) -> bytes:
    """Return the canonical bytes of the marks; `at_ms` is for people, nothing is decided by it."""
    rows = [{"stream": s, "seq": n, "hash": h} for s, n, h in sorted(marks)]
    return canonical({"streams": rows, "boot_id": boot_id, "at_ms": at_ms})


def sign(key: EllipticCurvePrivateKey, data: bytes) -> bytes:
    """Return the node key's signature over the domain line and `data`."""
    return key.sign(MARKS.encode() + b"\n" + data, ECDSA(SHA256()))


def verify(key: object, data: bytes, signature: bytes) -> list[Mark]:
    """Return the marks in `data` when the key of the node's certificate signed them.

    Raises Untrusted (``untrusted.marks``) or Malformed.
    """
    if not isinstance(key, EllipticCurvePublicKey):
        raise Untrusted("the key of a node is ECDSA P-256", code="marks")
    try:
        key.verify(signature, MARKS.encode() + b"\n" + data, ECDSA(SHA256()))
    except InvalidSignature:
        raise Untrusted("the marks are not signed by the key of this node", code="marks") from None
    value = parse(data, limit=1 << 17)
    rows = value.get("streams") if isinstance(value, dict) else None
    if not isinstance(rows, list) or len(rows) > MAX_STREAMS or not all(isinstance(r, dict) for r in rows):
        raise Malformed(f"marks are a list of at most {MAX_STREAMS} streams", code="marks")
    return [Mark(check_name(text(r, "stream"), 96), number(r, "seq"), text(r, "hash", limit=71)) for r in rows]
