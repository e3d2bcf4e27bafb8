"""trust.json as the control plane makes it: one list of persons a version, signed anew for each node.

While fewer than two persons are pinned, safety officers who enrol are added by themselves, up to two. Any later
change waits for approvals of two pinned persons over exactly the new list (the supervisor checks that too).
The bundle signers of a node are those of its join, for ever: they never change by the wire.
"""

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from control_plane.settings import Settings
from control_plane.signing import Signers
from control_plane.store import bundles
from interlock.signed import TRUST, Signed, public_text, sign

THRESHOLD = 2


@dataclass(frozen=True)
class TrustList:
    """The newest version: persons as ``[{person, key}]``, approvals as signed values."""

    version: int
    persons: list[dict[str, str]]
    approvals: list[Any]

    @property
    def ready(self) -> bool:
        """Return whether enough persons are pinned to resume anything: the site leaves bootstrap."""
        return len(self.persons) >= THRESHOLD


def newest(connection: Connection) -> TrustList:
    """Return the newest trust list; version 1 without persons when there is none yet."""
    row = bundles.newest_trust(connection)
    if row is None:
        return TrustList(1, [], [])
    return TrustList(int(row.version), json.loads(row.body)["persons"], json.loads(row.approvals))


def grow(connection: Connection, now_us: int) -> TrustList | None:
    """Add officers who enrolled, up to the threshold; return the new list, None when nothing changed."""
    held = newest(connection)
    pinned = {p["person"] for p in held.persons}
    fresh = [{"person": p, "key": k} for p, k in bundles.officers(connection) if p not in pinned]
    room = THRESHOLD - len(held.persons)
    if room <= 0 or not fresh:
        return None
    made = TrustList(held.version + 1, [*held.persons, *fresh[:room]], [])
    bundles.add_trust(connection, made.version, {"persons": made.persons}, made.approvals, now_us)
    return made


def signed_for(
    node: str, found: TrustList, signers: Signers, settings: Settings, bundle_signers: list[dict[str, str]]
) -> Signed:
    """Return the list for one node, signed with the grant key (body: 0001-seams §7)."""
    return sign(TRUST, {
        "version": found.version, "node": node, "grant": [public_text(signers.grant.public_key())],
        "stop": [public_text(signers.stop.public_key())], "persons": found.persons, "threshold": THRESHOLD,
        "signers": bundle_signers, "cooldown_ms": settings.cooldown_ms, "approvals": found.approvals,
    }, signers.grant)
