"""Which keys this host believes, and how that list may change (0001-seams §7, docs/formats/trust.md).

Rules:
1. The first list comes with the join file, written by root; never over the wire.
2. A new list needs a higher version and the signature of a grant key IN FORCE.
3. Node, bundle signers and threshold never change by the wire; the threshold is at least 2.
4. While fewer persons than the threshold are pinned, persons may be added up to it. After that any change
   of persons, of keys, or a shorter cool-down needs `threshold` different pinned persons who signed
   exactly that new list.
5. No key serves two purposes, no two persons share a key.
6. Once two persons are pinned there are never fewer again: else rule 4 would let the control plane alone add some.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from interlock.call import number, text, texts
from interlock.canon import digest, parse
from interlock.errors import Conflict, Malformed, Untrusted
from interlock.signed import (
    TRUST,
    TRUST_APPROVAL,
    Signed,
    key_id,
    public_from_text,
    verify,
)

Keys = dict[str, Ed25519PublicKey]


@dataclass(frozen=True)
class Trust:
    """A verified trust list. `persons` maps the person's id to his key (base64)."""

    version: int
    node: str
    grant: tuple[str, ...]
    stop: tuple[str, ...]
    persons: dict[str, str]
    threshold: int
    signers: tuple[tuple[str, str], ...]
    cooldown_ms: int
    approvals: tuple[dict[str, Any], ...]

    @property
    def grant_keys(self) -> Keys:
        """Return the pinned grant keys by id (launch orders, leases, snapshots, resumes, trust)."""
        return _keys(self.grant)

    @property
    def stop_keys(self) -> Keys:
        """Return the pinned stop keys by id (stop orders, break-glass rights, stop snapshots)."""
        return _keys(self.stop)

    def person_key(self, person: str) -> Keys:
        """Return that person's one key by id, or nothing."""
        return _keys((self.persons[person],)) if person in self.persons else {}

    @property
    def bootstrap(self) -> bool:
        """Return whether there are too few persons yet to resume anything."""
        return len(self.persons) < self.threshold


def _keys(texts_: tuple[str, ...]) -> Keys:
    found = [public_from_text(t) for t in texts_]
    return {key_id(k): k for k in found}


def _pairs(body: dict[str, Any], field: str, name: str) -> tuple[tuple[str, str], ...]:
    rows = body.get(field)
    if not isinstance(rows, list) or not all(isinstance(r, dict) and set(r) == {name, "key"} for r in rows):
        raise Malformed(f"field {field!r} of a trust list is off", code="trust")
    return tuple((text(r, name, limit=256), text(r, "key", limit=64)) for r in rows)


def parse_body(body: dict[str, Any]) -> Trust:
    """Return the list that `body` describes, unverified; raises Malformed (``malformed.trust``)."""
    approvals = body.get("approvals", [])
    if not isinstance(approvals, list) or not all(isinstance(a, dict) for a in approvals):
        raise Malformed("approvals of a trust list are off", code="trust")
    persons, signers = _pairs(body, "persons", "person"), _pairs(body, "signers", "name")
    found = Trust(
        number(body, "version", low=1), text(body, "node", limit=64), texts(body, "grant", limit=16),
        texts(body, "stop", limit=16), dict(persons), number(body, "threshold", low=2, high=16), signers,
        number(body, "cooldown_ms"), tuple(approvals),
    )
    every = [*found.grant, *found.stop, *(k for _, k in persons), *(k for _, k in signers)]
    for key in every:
        public_from_text(key)
    if not found.grant or not found.stop or len(set(every)) != len(every) or len(found.persons) != len(persons):
        raise Malformed("a trust list pins each key for one purpose and one person", code="trust")
    return found


def first(signed: Signed) -> Trust:
    """Return the list of the join file: it vouches for itself, the file's owner (root) for it."""
    found = parse_body(signed.body())
    verify(signed, TRUST, found.grant_keys)
    return found


def load(path: Path) -> Trust | None:
    """Read `trust.json`; None when it does not exist.

    Raises Untrusted when others can write it, Malformed or Untrusted for its content.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as source:
        info = os.fstat(source.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
            raise Untrusted(f"others can write {path}", code="trust", next_step="join this node again")
        data = source.read(1 << 20)
    return first(Signed.from_json(parse(data)))


def persons_digest(persons: dict[str, str]) -> str:
    """Return the digest that persons approve: of the list, sorted by person."""
    return digest([{"person": p, "key": k} for p, k in sorted(persons.items())])


def approval_body(version: int, persons: dict[str, str]) -> dict[str, Any]:
    """Return what a person signs (interlock/trust-approval/v1) to make `persons` (person → key) list `version`."""
    return {"version": version, "persons_digest": persons_digest(persons)}


def keys_digest(trust: Trust) -> str:
    """Return the digest that persons approve besides, where keys change or the cool-down gets shorter."""
    return digest({"grant": list(trust.grant), "stop": list(trust.stop), "cooldown_ms": trust.cooldown_ms})


def replace(old: Trust, signed: Signed) -> Trust:
    """Return the list that replaces `old`; raises Untrusted, Conflict (``conflict.trust_version``), Malformed."""
    body = verify(signed, TRUST, old.grant_keys)
    new = parse_body(body)
    if new.version <= old.version:
        raise Conflict("a trust list needs a higher version", code="trust_version")
    if (new.node, new.threshold, new.signers) != (old.node, old.threshold, old.signers):
        raise Untrusted(
            "node, threshold and bundle signers never change by the wire", code="trust",
            next_step="join this node again",
        )
    if new.bootstrap and not old.bootstrap:
        raise Untrusted("a trust list never falls below its threshold again", code="trust",
                        next_step="add a person in the same change")
    keys_change = (new.grant, new.stop) != (old.grant, old.stop) or new.cooldown_ms < old.cooldown_ms
    if new.persons == old.persons and not keys_change:
        return new
    added = old.persons.items() <= new.persons.items() and len(new.persons) <= old.threshold
    if old.bootstrap and added and not keys_change:
        return new
    _approved(old, new, keys_change)
    return new


def _approved(old: Trust, new: Trust, keys_change: bool) -> None:
    wanted = approval_body(new.version, new.persons)
    if keys_change:
        wanted["keys_digest"] = keys_digest(new)
    good: set[str] = set()
    for row in new.approvals:
        signed = Signed.from_json(row)
        body = signed.body()
        if not wanted.items() <= body.items():
            continue
        good.update(p for p in old.persons if _signed_by(old, signed, p))
    if len(good) < old.threshold:
        raise Untrusted(
            f"{len(good)} of {old.threshold} needed persons approved this trust list", code="trust",
            next_step="let two pinned persons sign the new list",
        )


def _signed_by(old: Trust, signed: Signed, person: str) -> bool:
    try:
        verify(signed, TRUST_APPROVAL, old.person_key(person))
    except Untrusted:
        return False
    return True
