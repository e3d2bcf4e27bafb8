"""Entitlements as a node knows them: who has which role in which tenant, signed and bound to one question.

The nonce is what the node asked with, so an old answer cannot be played again; the age counts from the sending
of that question, by the node's own clock. Page: docs/formats/snapshot.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from interlock.call import number, text, texts
from interlock.errors import Malformed, Untrusted
from interlock.signed import SNAPSHOT, Signed
from interlock.signed import verify as verify_signed

_FIELDS = {"nonce", "roles", "programmes", "disabled", "bundle_version", "epoch"}
MAX_ROWS = 100_000


@dataclass(frozen=True)
class Snapshot:
    """A verified snapshot. `roles` holds (person, tenant, role), `memberships` (person, programme)."""

    nonce: str
    roles: frozenset[tuple[str, str, str]]
    memberships: frozenset[tuple[str, str]]
    disabled: frozenset[str]
    bundle_version: int
    epoch: int

    def roles_of(self, person: str, tenant: str) -> frozenset[str]:
        """Return the roles of `person` in `tenant`; none for a disabled person."""
        if person in self.disabled:
            return frozenset()
        return frozenset(r for p, t, r in self.roles if p == person and t == tenant)

    def programmes_of(self, person: str) -> frozenset[str]:
        """Return the programmes of `person`; none for a disabled person."""
        if person in self.disabled:
            return frozenset()
        return frozenset(m for p, m in self.memberships if p == person)


def verify(signed: Signed, grant_keys: Mapping[str, Ed25519PublicKey], nonce: str) -> Snapshot:
    """Return the snapshot that a pinned grant key signed for the open `nonce`.

    Raises Untrusted (signature, ``untrusted.nonce``) or Malformed.
    """
    body = verify_signed(signed, SNAPSHOT, grant_keys)
    if not nonce or text(body, "nonce", limit=128) != nonce:
        raise Untrusted("the snapshot answers another question", code="nonce", next_step="ask for a new one")
    if set(body) != _FIELDS:
        raise Malformed("unknown fields of a snapshot", code="snapshot")
    return Snapshot(
        nonce,
        frozenset((text(r, "person"), text(r, "tenant"), text(r, "role"))
                  for r in _rows(body, "roles", {"person", "tenant", "role"})),
        frozenset((text(r, "person"), text(r, "programme"))
                  for r in _rows(body, "programmes", {"person", "programme"})),
        frozenset(texts(body, "disabled", limit=MAX_ROWS)), number(body, "bundle_version"), number(body, "epoch"),
    )


def _rows(body: Mapping[str, Any], key: str, fields: set[str]) -> list[dict[str, Any]]:
    rows = body.get(key)
    if not isinstance(rows, list) or len(rows) > MAX_ROWS:
        raise Malformed(f"field {key!r} of a snapshot is no list", code="snapshot")
    if not all(isinstance(r, dict) and set(r) == fields for r in rows):
        raise Malformed(f"a row of {key!r} has other fields than {', '.join(sorted(fields))}", code="snapshot")
    return rows
