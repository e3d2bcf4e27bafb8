"""Who may stop and who may resume, checked with pinned keys alone.

Rules (protocol.md §3):
1. A stop counts when a pinned stop key signed it, whatever its epoch. A stop of this supervisor's own key
   (a local stop) counts for this node or one run only.
2. A resume counts when a grant key signed it AND `threshold` different persons signed exactly its ids with
   the keys that are pinned for them. Neither may have asked for one of the stops nor own a run under them.
3. A resume is newer than every stop that it lifts.
4. An authentic stop is never lost: what cannot be understood of it makes it wider (this node, kill), not void.
5. A break-glass order is a right, not a stop: each use mints a new id, else a second use would be a no-op.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from interlock.call import new_id, text
from interlock.errors import Conflict, Denied, Malformed, Untrusted
from interlock.order import Labels, Mode, ResumeApproval, ResumeOrder, Scope, ScopeKind, StopOrder
from interlock.signed import BREAK_GLASS, RESUME, RESUME_APPROVAL, STOP, Signed, key_id, signers, verify
from killswitch.trust import Trust

UNJOINED = "unjoined"


@dataclass(frozen=True)
class Host:
    """Who this supervisor is: node id (`UNJOINED` before the join) and its public key."""

    node: str
    key: Ed25519PublicKey


def verify_stop(signed: Signed, trust: Trust | None, host: Host) -> StopOrder:
    """Return the stop that `signed` carries.

    Raises Untrusted for an unknown or bad signature and (``untrusted.scope``) for a local stop that reaches
    further than this node.
    """
    own = {key_id(host.key): host.key}
    pinned = trust.stop_keys if trust else {}
    body = verify(signed, STOP, {**pinned, **own})
    order = understood(signed, body, host.node)
    if not signers(signed, pinned) and not is_local(order.scope, host.node):
        raise Untrusted("a local stop covers its own node or one run only", code="scope")
    return order


def understood(signed: Signed, body: dict[str, Any], node: str) -> StopOrder:
    """Return the stop in `body`, whose signature was verified; what is odd in it covers this whole node.

    Its id is kept where there is one, so that a resume can name it.
    """
    try:
        return StopOrder.from_json(body)
    except Malformed as error:
        try:
            id_ = text(body, "id", limit=64)
        except Malformed:
            id_ = "odd_" + hashlib.sha256(signed.payload).hexdigest()[:32]
        return StopOrder(id_, Scope(ScopeKind.NODE, node), Mode.KILL, 0, "unknown", f"an odd stop: {error.message}")


def is_local(scope: Scope, node: str) -> bool:
    """Return whether a supervisor may order this scope by itself."""
    return scope.kind is ScopeKind.RUN or scope == Scope(ScopeKind.NODE, node)


def local_scope(scope: Scope, node: str) -> Scope:
    """Return the widest local scope that is meant: everything means this node, any label a run may carry
    widens to this node (a stop may always be wider), a run stays a run.

    Raises Untrusted (``untrusted.scope``) for another node.
    """
    if scope.kind is ScopeKind.RUN:
        return scope
    if scope.kind is ScopeKind.NODE and scope.id != node:
        raise Untrusted(f"this is not node {scope.id}", code="scope", next_step="use the order of this node")
    return Scope(ScopeKind.NODE, node)


def use_break_glass(signed: Signed, trust: Trust | None, node: str, epoch: int) -> StopOrder:
    """Return the stop of one use of a pre-signed right, with a new id. Raises Untrusted."""
    right = understood(signed, verify(signed, BREAK_GLASS, trust.stop_keys if trust else {}), node)
    scope = local_scope(right.scope, node)
    reason = f"break-glass {right.id}: {right.reason}"[:1000]
    return replace(right, id=new_id("stop"), scope=scope, epoch=max(epoch, right.epoch), reason=reason)


def verify_resume(
    signed: Signed, trust: Trust | None, stops: Mapping[str, StopOrder], runs: Iterable[Labels]
) -> ResumeOrder:
    """Return the resume that `signed` carries, after every check of rule 2 and 3.

    Args: `stops` the active stops by id; `runs` the labels of every run of this host, ended ones included.
    Raises Untrusted, Denied (``denied.same_person``), Conflict (``conflict.epoch``) or Malformed.
    """
    if trust is None:
        raise Untrusted("this node has not joined; nobody is pinned", code="trust")
    order = ResumeOrder.from_json(verify(signed, RESUME, trust.grant_keys))
    persons = {_approver(Signed.from_json(a), order, trust) for a in order.approvals}
    requests = {str(Signed.from_json(a).body().get("request")) for a in order.approvals}
    if len(persons) < trust.threshold or len(requests) != 1:
        raise Untrusted(
            f"{len(persons)} of {trust.threshold} needed persons signed this resume", code="threshold",
            next_step="let two different persons sign the same request",
        )
    lifted = [stops[i] for i in order.clears if i in stops]
    _apart(persons, lifted, runs)
    if any(order.epoch <= s.epoch for s in lifted):
        raise Conflict("a resume is newer than each stop that it lifts", code="epoch")
    return order


def _approver(approval: Signed, order: ResumeOrder, trust: Trust) -> str:
    """Return who signed, once his pinned key and exactly these ids are established."""
    claimed = ResumeApproval.from_json(approval.body())
    verify(approval, RESUME_APPROVAL, trust.person_key(claimed.person))
    if claimed.clears != order.clears or claimed.head != order.head:
        raise Untrusted("an approval is for other stops", code="approval", next_step="sign this very request")
    return claimed.person


def _apart(persons: set[str], lifted: list[StopOrder], runs: Iterable[Labels]) -> None:
    labels = list(runs)
    for stop in lifted:
        owners = {r.owner for r in labels if stop.scope.matches(r)}
        if persons & {stop.actor, *owners}:
            raise Denied(
                "who asked for a stop, or owns a run under it, does not resume it", code="same_person",
                next_step="ask a person who is neither",
            )


def kind_of(signed: Signed) -> str:
    """Return ``stop``, ``resume`` or ``break-glass``; raises Malformed (``malformed.format``)."""
    names = {STOP: "stop", RESUME: "resume", BREAK_GLASS: "break-glass"}
    if signed.format not in names:
        raise Malformed("this is no stop, resume or break-glass order", code="format")
    return names[signed.format]
