"""One heartbeat of a supervisor: its orders and receipts in; leases, refusals, stops and trust out.

Whatever carries it, the answer is bound to nonces and signed. Orders and receipts are taken first, each for
itself: one that is off must not hold back the others, and nothing of it is a reason to withhold a lease or a stop.
"""

from dataclasses import dataclass
from typing import Any

from control_plane import trust_list
from control_plane.issuer import Beat, answer
from control_plane.parts import Parts
from control_plane.proof import take_receipt
from control_plane.resume import readmit
from control_plane.signing import bundle_signers
from control_plane.standing import Standing
from control_plane.store import nodes
from control_plane.store.db import now_us, reading, writing
from interlock.call import number, text
from interlock.errors import Malformed, Refusal, Unavailable
from interlock.event import Event, EventType
from interlock.signed import RESUME, STOP, STOPS, Signed, sign

MAX_ROWS = 512
MAX_TOLD = 64


@dataclass(frozen=True)
class Heartbeat:
    """The parsed body (0001-seams §3 `beats`)."""

    boot_id: str
    nonce: str
    digest: str
    trust_version: int
    beats: list[Beat]
    orders: list[Signed]
    receipts: list[Signed]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Heartbeat":
        """Parse; raises Malformed."""
        return cls(
            text(value, "boot_id", empty=True, limit=64), text({"nonce": "", **value}, "nonce", empty=True, limit=64),
            text(value, "digest", empty=True, limit=128), number({"trust_version": 0, **value}, "trust_version"),
            [Beat.from_json(b) for b in _rows(value, "beats")],
            [Signed.from_json(o) for o in _rows(value, "orders")],
            [Signed.from_json(r) for r in _rows(value, "receipts")],
        )


def _rows(value: dict[str, Any], key: str) -> list[Any]:
    found = value.get(key, [])
    if not isinstance(found, list) or len(found) > MAX_ROWS:
        raise Malformed(f"field {key!r} is a list of at most {MAX_ROWS}")
    return found


def respond(parts: Parts, node: str, beat: Heartbeat) -> dict[str, Any]:
    """Return the answer to a heartbeat of `node`. Raises Denied (another node's run) or Unavailable."""
    acked = _take_orders(parts, node, beat.orders)
    receipts_acked = _take_receipts(parts, node, beat.receipts)
    with writing(parts.engine) as connection:
        leases, refused, standing = answer(parts.desk, parts.signers, connection, node, beat.beats)
        level = beat.digest == parts.desk.digest(standing)
        nodes.beat(connection, node, beat.boot_id, now_us(), echo=level)
        trust = trust_list.after(connection, beat.trust_version)
    parts.trust_seen[node] = beat.trust_version
    for lease in leases:
        granted = lease.body()
        parts.keys.leased(text(granted, "run"), number(granted, "attempt"))
    for row in refused:
        parts.desk.note(Event(EventType.LEASE_REFUSED, f"node/{node}", run=row["run"], facts={
            "attempt": row["attempt"], "code": row["code"], "node": node}))
    return {
        "leases": [lease.as_json() for lease in leases], "refused": refused,
        "orders": [] if level else [o.as_json() for o in _lacking(parts, standing)],
        "stops": _stops(parts, beat.nonce, standing),
        "trust": None if trust is None else _trust(parts, node, trust),
        "acked": acked, "receipts_acked": receipts_acked,
    }


def _take_orders(parts: Parts, node: str, orders: list[Signed]) -> list[str]:
    """Ingest what is unknown here; return the ids that the order log holds now."""
    ids = []
    for signed in orders:
        try:
            ids.append(_take_order(parts, node, signed))
        except Unavailable:
            continue  # the node brings it again
        except Refusal as refusal:
            _incident(parts, node, "an order that a node brought was refused", refusal)
    try:
        anchored = parts.desk.anchored_ids()
    except Unavailable:
        return []
    return [i for i in ids if i in anchored]


def _take_order(parts: Parts, node: str, signed: Signed) -> str:
    if signed.format == STOP:
        return parts.desk.ingest_local(node, signed)
    if signed.format != RESUME:
        raise Malformed("a node brings stop and resume orders only", code="format")
    order = text(signed.body(), "id", limit=64)
    if order in parts.desk.anchored_ids():
        return order
    with reading(parts.engine) as connection:
        persons = trust_list.newest(connection).persons
    return readmit(parts.desk, parts.signers, signed, persons)


def _take_receipts(parts: Parts, node: str, receipts: list[Signed]) -> list[str]:
    taken = []
    for signed in receipts:
        try:
            with writing(parts.engine) as connection:
                taken.append(take_receipt(parts.desk, connection, node, signed))
        except Unavailable:
            continue
        except Refusal as refusal:
            _incident(parts, node, "a receipt was refused", refusal)
    if taken:
        parts.bell.ring()
    return taken


def _incident(parts: Parts, node: str, what: str, refusal: Refusal) -> None:
    parts.desk.note(Event(EventType.INCIDENT, f"node/{node}", facts={
        "what": what, "code": refusal.code, "reason": refusal.message}))


def _lacking(parts: Parts, standing: Standing) -> list[Signed]:
    """Return the orders for a node whose sets differ from ours: the stops in force, and the newest resumes."""
    found = parts.desk.signed_orders()
    active = {s.id for s in standing.active}
    stops = [s for i, s in found.items() if i in active]
    resumes = [s for s in found.values() if s.format == RESUME]
    return [*stops, *resumes[-MAX_TOLD:]]


def _stops(parts: Parts, nonce: str, standing: Standing) -> dict[str, Any] | None:
    """Return the signed snapshot of the stop sets for an open nonce; none while we ourselves may lack orders."""
    if not nonce or not standing.grant_ok:
        return None
    found, active = parts.desk.signed_orders(), {s.id for s in standing.active}
    body = {
        "nonce": nonce, "orders": [s.as_json() for i, s in found.items() if i in active],
        "cleared": sorted(standing.cleared), "epoch": standing.epoch,
    }
    return sign(STOPS, body, parts.signers.stop).as_json()


def _trust(parts: Parts, node: str, found: trust_list.TrustList) -> dict[str, Any] | None:
    try:
        rows = {r["node"]: r["signers"] for r in parts.desk.log.enrolled()}
    except Unavailable:
        return None  # a later heartbeat brings it; leases do not wait for it
    signers = rows.get(node, bundle_signers(parts.settings.places.trust))
    return trust_list.signed_for(node, found, parts.signers, parts.settings, signers).as_json()
