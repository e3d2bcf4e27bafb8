"""Entitlements as a node knows them: who has which role in which tenant, which API keys live, which models are
offered. Signed, and bound to one question.

The nonce is what the node asked with, so an old answer cannot be played again; the age counts from the sending
of that question, by the node's own clock. Page: docs/formats/snapshot.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from interlock.call import number, text, texts
from interlock.errors import Malformed, Untrusted
from interlock.signed import SNAPSHOT, Signed
from interlock.signed import verify as verify_signed
from interlock.tier import Tier, tier_of

_FIELDS = {"nonce", "roles", "programmes", "disabled", "keys", "models", "bundle_version", "epoch"}
MAX_ROWS = 100_000
MAX_MODELS = 10_000
MAX_SCOPES, MAX_LINEAGE = 64, 1024
OFFERED = ("approved", "serving")


@dataclass(frozen=True)
class ApiKey:
    """A live API key: `hash` is ``sha256:`` over the whole credential, `person` the human behind."""

    id: str
    hash: str
    person: str
    tenant: str
    scopes: frozenset[str]


@dataclass(frozen=True)
class ModelRow:
    """A model that may be called: `version` the manifest digest, `lineage` names of its ancestor models."""

    name: str
    tenant: str
    tier: Tier
    version: str
    state: str
    lineage: tuple[str, ...]


@dataclass(frozen=True)
class Snapshot:
    """A verified snapshot. `roles` holds (person, tenant, role), `memberships` (person, programme), `keys` the live
    API keys by id; a disabled person's keys are not among them."""

    nonce: str
    roles: frozenset[tuple[str, str, str]]
    memberships: frozenset[tuple[str, str]]
    disabled: frozenset[str]
    bundle_version: int
    epoch: int
    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    models: tuple[ModelRow, ...] = ()

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

    def model(self, name: str) -> ModelRow | None:
        """Return the offered model of that name, or None."""
        return next((m for m in self.models if m.name == name), None)


def verify(signed: Signed, grant_keys: Mapping[str, Ed25519PublicKey], nonce: str) -> Snapshot:
    """Return the snapshot that a pinned grant key signed for the open `nonce`.

    Raises Untrusted (signature, ``untrusted.nonce``) or Malformed.
    """
    body = verify_signed(signed, SNAPSHOT, grant_keys)
    if not nonce or text(body, "nonce", limit=128) != nonce:
        raise Untrusted("the snapshot answers another question", code="nonce", next_step="ask for a new one")
    if set(body) != _FIELDS:
        raise Malformed("unknown fields of a snapshot", code="snapshot")
    disabled = frozenset(texts(body, "disabled", limit=MAX_ROWS))
    return Snapshot(
        nonce,
        frozenset((text(r, "person"), text(r, "tenant"), text(r, "role"))
                  for r in _rows(body, "roles", {"person", "tenant", "role"})),
        frozenset((text(r, "person"), text(r, "programme"))
                  for r in _rows(body, "programmes", {"person", "programme"})),
        disabled, number(body, "bundle_version"), number(body, "epoch"), _keys(body, disabled), _models(body),
    )


def _rows(body: Mapping[str, Any], name: str, fields: set[str], limit: int = MAX_ROWS) -> list[dict[str, Any]]:
    rows = body.get(name)
    if not isinstance(rows, list) or len(rows) > limit:
        raise Malformed(f"field {name!r} of a snapshot is no list of at most {limit} rows", code="snapshot")
    if not all(isinstance(r, dict) and set(r) == fields for r in rows):
        raise Malformed(f"a row of {name!r} has other fields than {', '.join(sorted(fields))}", code="snapshot")
    return rows


def _keys(body: Mapping[str, Any], disabled: frozenset[str]) -> Mapping[str, ApiKey]:
    """Return the keys by id. Those of a disabled person are left out here too, whatever the control plane sent."""
    found = [
        ApiKey(text(r, "id", limit=64), text(r, "hash", limit=80), text(r, "person"), text(r, "tenant"),
               frozenset(texts(r, "scopes", limit=MAX_SCOPES)))
        for r in _rows(body, "keys", {"id", "hash", "person", "tenant", "scopes"})
    ]
    if len({k.id for k in found}) != len(found):
        raise Malformed("an API key occurs twice in a snapshot", code="snapshot")
    return MappingProxyType({k.id: k for k in found if k.person not in disabled})


def _models(body: Mapping[str, Any]) -> tuple[ModelRow, ...]:
    fields = {"name", "tenant", "tier", "version", "state", "lineage"}
    found = tuple(
        ModelRow(text(r, "name", limit=256), text(r, "tenant"), tier_of(r["tier"]), text(r, "version", limit=80),
                 text(r, "state", limit=16), texts(r, "lineage", limit=MAX_LINEAGE))
        for r in _rows(body, "models", fields, MAX_MODELS)
    )
    if len({m.name for m in found}) != len(found):
        raise Malformed("a model occurs twice in a snapshot", code="snapshot")
    if not all(m.state in OFFERED for m in found):
        raise Malformed("a model in a snapshot is neither approved nor serving", code="snapshot")
    return found
