"""Exports: a byte-deterministic zip that anyone verifies offline with the pinned key (`audit/verify.py`).

The whole range is the default: only from it can the root be rebuilt and a missing record be seen. A
selection proves each of its records and says that it is one. Making an export is itself an event, recorded
by whoever asks for it. Page: docs/formats/export.md.
"""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from audit.ledger import Ledger, Row, SignedHead
from audit.verify import FORMAT, MAX_BYTES, pack, sha256
from interlock.canon import canonical
from interlock.durable import write_new
from interlock.errors import Conflict, Malformed, Unavailable

_PAGE = 1000
_README = """Export of an Interlock ledger.

leaves.jsonl    one record a line, the exact bytes that were hashed
streams.json    every writing process: what it claimed and how far it arrived
head.note       signed tree head (C2SP signed note): origin, size, RFC 6962 root
manifest.json   digest of each member; manifest.note is its signature
proofs.jsonl    only in a selection: an inclusion proof for each record
ledger.vkey     the key for convenience. PIN YOUR OWN COPY, got on another way.

Verify: python verify.py EXPORT --key ledger.vkey
Exit 0 ok, 1 tampered, 2 incomplete, 3 usage.
"""


def _pages(ledger: Ledger, size: int, filters: Mapping[str, str]) -> Iterator[Row]:
    after = -1
    while found := ledger.rows(after=after, limit=_PAGE, below=size, **filters):
        yield from found
        after = found[-1].index


def _members(ledger: Ledger, head: SignedHead, filters: Mapping[str, str]) -> tuple[dict[str, bytes], int]:
    indexes, lines, total = [], [], 0
    for row in _pages(ledger, head.size, filters):
        indexes.append(row.index)
        lines.append(row.body + b"\n")
        total += len(row.body)
        if total > MAX_BYTES // 2:
            raise Malformed("an export holds at most 1 GiB of records", code="too_large",
                            next_step="select by run or type")
    members = {
        "leaves.jsonl": b"".join(lines), "head.note": head.note.encode(), "readme.txt": _README.encode(),
        "ledger.vkey": ledger.vkey().encode() + b"\n",
    }
    if filters:
        proofs = ledger.proofs(indexes, head.size)
        rows = [{"index": i, "proof": [base64.b64encode(h).decode() for h in p]}
                for i, p in zip(indexes, proofs, strict=True)]
        members["proofs.jsonl"] = b"".join(canonical(r) + b"\n" for r in rows)
    else:
        members["streams.json"] = canonical(ledger.stream_rows()) + b"\n"
    return members, len(indexes)


def build(ledger: Ledger, filters: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of an export up to the newest signed head.

    `filters` as Ledger.rows() takes them make it a selection. Raises NotFound (no head yet), Malformed
    (another filter, too large), Unavailable.
    """
    head, chosen = ledger.head(), dict(filters or {})
    members, count = _members(ledger, head, chosen)
    manifest: dict[str, Any] = {
        "format": FORMAT, "origin": ledger.origin, "scope": "selection" if chosen else "whole", "filter": chosen,
        "size": head.size, "records": count,
        "members": {name: {"sha256": sha256(body), "bytes": len(body)} for name, body in members.items()},
    }
    members["manifest.json"] = canonical(manifest)
    members["manifest.note"] = ledger.signer.sign_manifest(sha256(members["manifest.json"])).encode()
    return pack(members)


def export(ledger: Ledger, out: Path, *, filters: Mapping[str, str] | None = None) -> Path:
    """Write an export to the new file `out` (0600) and return it; raises as build(), Conflict, Unavailable."""
    data = build(ledger, filters)
    try:
        write_new(out, data)
    except FileExistsError:
        raise Conflict(f"{out} exists already", code="file", next_step="choose another name") from None
    except OSError as error:
        raise Unavailable(f"cannot write {out}: {error.strerror}", code="file", next_step="free space") from None
    return out
