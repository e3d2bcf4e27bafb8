"""trust.json as the control plane makes it: one list of persons a version, signed anew for each node.

While fewer than two persons are pinned, safety officers who enrol are added by themselves, up to two. Any later
change needs approvals of two pinned persons over exactly the new list (trust_change.py; the supervisor checks too).
A node gets the versions one after the other: it accepts a list by the persons of the one before.
The bundle signers of a node are those of its join, for ever: they never change by the wire. A shorter cool-down
neither: a version never has a shorter one than the version before it.
"""

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from control_plane.settings import Settings
from control_plane.signing import Signers
from control_plane.store import bundles
from interlock.signed import TRUST, Signed, public_text, sign
from killswitch.trust import persons_digest

THRESHOLD = 2
SAFE = 3  # pinned officers; with fewer, a stop that one of them gave cannot be resumed by two others


@dataclass(frozen=True)
class TrustList:
    """One version: persons as ``[{person, key}]``, approvals as signed values, cool-down (None: as in settings)."""

    version: int
    persons: list[dict[str, str]]
    approvals: list[Any]
    cooldown_ms: int | None = None

    @property
    def ready(self) -> bool:
        """Return whether enough persons are pinned to resume anything: the site leaves bootstrap."""
        return len(self.persons) >= THRESHOLD

    @property
    def keys(self) -> dict[str, str]:
        """Return person → public key."""
        return {p["person"]: p["key"] for p in self.persons}

    @property
    def head(self) -> str:
        """Return what an approval of the next change is bound to: exactly this list."""
        return f"trust:{self.version}:{persons_digest(self.keys)}"


def _of(row: Row[Any]) -> TrustList:
    body = json.loads(row.body)
    return TrustList(int(row.version), body["persons"], json.loads(row.approvals), body.get("cooldown_ms"))


def newest(connection: Connection) -> TrustList:
    """Return the newest trust list; version 1 without persons when there is none yet."""
    row = bundles.newest_trust(connection)
    return TrustList(1, [], []) if row is None else _of(row)


def after(connection: Connection, version: int) -> TrustList | None:
    """Return the list that a node with `version` needs next, None when it has the newest."""
    row = bundles.trust_after(connection, version)
    return None if row is None else _of(row)


def put(connection: Connection, made: TrustList, now_us: int) -> None:
    """Keep a new version."""
    body = {"persons": made.persons, "cooldown_ms": made.cooldown_ms}
    bundles.add_trust(connection, made.version, body, made.approvals, now_us)


def cooldown(held: TrustList, settings: Settings) -> int:
    """Return the cool-down of the version after `held`, in ms: as in the settings, never shorter than in `held`."""
    return max(held.cooldown_ms or 0, settings.cooldown_ms)


def grow(connection: Connection, settings: Settings, now_us: int) -> TrustList | None:
    """Add officers who enrolled, up to the threshold; return the new list, None when nothing changed."""
    held = newest(connection)
    fresh = [{"person": p, "key": k} for p, k in bundles.officers(connection) if p not in held.keys]
    room = THRESHOLD - len(held.persons)
    if room <= 0 or not fresh:
        return None
    made = TrustList(held.version + 1, [*held.persons, *fresh[:room]], [], cooldown(held, settings))
    put(connection, made, now_us)
    return made


def signed_for(
    node: str, found: TrustList, signers: Signers, settings: Settings, bundle_signers: list[dict[str, str]]
) -> Signed:
    """Return the list for one node, signed with the grant key (body: 0001-seams §7)."""
    cooldown_ms = settings.cooldown_ms if found.cooldown_ms is None else found.cooldown_ms
    return sign(TRUST, {
        "version": found.version, "node": node, "grant": [public_text(signers.grant.public_key())],
        "stop": [public_text(signers.stop.public_key())], "persons": found.persons, "threshold": THRESHOLD,
        "signers": bundle_signers, "cooldown_ms": cooldown_ms, "approvals": found.approvals,
    }, signers.grant)
