"""What the grant key signs for runs: launch orders and leases. Both are decided inside one transaction.

Rules (protocol.md §4):
1. Nothing is granted unless the standing of this very transaction allows it (G4, G5, G6).
2. A lease needs: the attempt is placed on the node of the certificate, current, not over, not stopped, its owner
   enabled, and its permit's epoch at least that of the last order that matched the run (G7).
3. A grant that never went live within 60 s gets no lease.
4. REFUSED is said only for a reason; when nothing may be granted the answer is silence, and the run lives out
   its tier's limit.
5. What nobody could read is not signed: one unreadable order would spoil the heartbeats of everything on its node.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from control_plane.desk import OrderDesk, refuse_if_stopped
from control_plane.signing import Signers
from control_plane.standing import Standing
from control_plane.store import runs
from control_plane.store.db import now_us, writing
from interlock.call import new_id, number, text
from interlock.errors import Denied, Malformed
from interlock.order import Labels, LaunchOrder, Lease, Plan
from interlock.permit import Permit
from interlock.signed import GRANT, LEASE, Signed, sign
from interlock.tier import PROFILES
from interlock.touched import action_of

GRANT_LIFE_US = 60_000_000


@dataclass(frozen=True)
class Placement:
    """What a new attempt is: run, number, labels, plan, and the facts for the node's own gate."""

    run: str
    attempt: int
    labels: Labels
    plan: Plan
    facts: dict[str, Any]
    approval: str = ""


def place(
    desk: OrderDesk, signers: Signers, permit: Permit, placement: Placement, path: str,
    within: Callable[[Connection], None] | None = None, kept: Callable[[Connection], None] | None = None,
) -> LaunchOrder:
    """Sign the launch order of one attempt and keep it; the permit is checked in the same transaction.

    Args: `path` the resource that the permit is for; `within` what must hold and be used up in the same
    transaction (approvals); `kept` what is kept in it beside the run's row (its key). Raises Halted (a stop, also
    one that came in between), Stale or Unavailable (nothing is granted now), Untrusted (the permit), Malformed (the
    order is larger than a node reads, or has more ancestor models).
    """
    action = action_of(placement.plan, placement.attempt)
    with writing(desk.engine) as connection:
        standing = desk.granting(connection)
        refuse_if_stopped(standing, placement.labels)
        permit.check(action, path, epoch=standing.epoch)
        if within is not None:
            within(connection)
        tier = PROFILES[placement.plan.tier]
        order = LaunchOrder(
            new_id("launch"), placement.run, placement.attempt, placement.labels, placement.plan, standing.epoch,
            tier.lease_ms, tier.absent_ms, placement.facts)
        desk.log.place(placement.run, placement.attempt, placement.labels.node)
        signed = sign(GRANT, order.as_json(), signers.grant)
        LaunchOrder.from_json(signed.body())
        if placement.attempt == 1:
            runs.add_run(connection, placement.run, order, placement.approval, now_us())
        runs.add_attempt(connection, order, signed, now_us())
        if kept is not None:
            kept(connection)
    desk.bell.ring()
    return order


@dataclass(frozen=True)
class Beat:
    """One heartbeat of one attempt."""

    nonce: str
    run: str
    attempt: int

    @classmethod
    def from_json(cls, value: object) -> "Beat":
        """Parse one row of `beats`; raises Malformed."""
        if not isinstance(value, dict):
            raise Malformed("a beat is not an object")
        return cls(text(value, "nonce", limit=64), text(value, "run", limit=64), number(value, "attempt", low=1))

    def refused(self, code: str) -> dict[str, Any]:
        """Return the REFUSED of this beat."""
        return {"nonce": self.nonce, "run": self.run, "attempt": self.attempt, "code": code}


def require_own(node: str, row: Row[Any] | None) -> None:
    """Raise Denied (``denied.node``) when an attempt is placed on another node than the certificate's."""
    if row is not None and row.node != node:
        raise Denied("that run is placed on another node", code="node")


def answer(
    desk: OrderDesk, signers: Signers, connection: Connection, node: str, beats: list[Beat]
) -> tuple[list[Signed], list[dict[str, Any]], Standing]:
    """Return (leases, refusals, the standing they rest on) for the beats of `node`, all of `connection`'s transaction.

    Raises Denied when a beat is about another node's run.
    """
    standing = desk.standing(connection)
    leases: list[Signed] = []
    refused: list[dict[str, Any]] = []
    for beat in beats:
        row = runs.attempt(connection, beat.run, beat.attempt)
        require_own(node, row)
        code = _why_not(connection, standing, row)
        if code:
            refused.append(beat.refused(code))
        elif standing.grant_ok and row is not None:
            leases.append(_lease(signers, standing, connection, beat, row))
    return leases, refused, standing


def _why_not(connection: Connection, standing: Standing, row: Row[Any] | None) -> str:
    """Return the code of a refusal, empty when nothing speaks against a lease."""
    if row is None:
        return "not_found.attempt" if standing.grant_ok else ""
    labels = Labels.from_json(json.loads(row.labels))
    if standing.stopped(labels) is not None:
        return "stopped.order"
    if standing.permit_too_old(row.epoch, labels):
        return "stopped.epoch"
    if row.state in runs.OVER or row.outcome:
        return "conflict.over"
    if row.live_us == 0 and now_us() - row.granted_us > GRANT_LIFE_US:
        return "conflict.grant_expired"
    run = runs.one(connection, row.run)
    if run is None or run.attempt != row.attempt:
        return "conflict.attempt"
    if runs.disabled(connection, labels.owner):
        return "denied.owner"
    return ""


def _lease(signers: Signers, standing: Standing, connection: Connection, beat: Beat, row: Row[Any]) -> Signed:
    launch = LaunchOrder.from_json(Signed.from_json(json.loads(row.launch)).body())
    runs.leased(connection, beat.run, beat.attempt, now_us())
    lease = Lease(beat.nonce, beat.run, beat.attempt, row.node, launch.lease_ms, standing.epoch)
    return sign(LEASE, lease.as_json(), signers.grant)
