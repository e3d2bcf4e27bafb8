"""From a plan to a launch order: code and versions known → node chosen → data → approvals → gate → placed.

Rules:
1. The gate is asked last, so that neither factor nor approval is spent on what fails for another reason.
2. Approvals count only when they are for exactly this plan and this requester, as of now; they are used up in
   the transaction that places the run.
3. A stop that comes in between voids the permit; the question is asked once more and then refused.
4. The versions that a plan loads are asked for again in the transaction that places an attempt, the first and each
   later one: what was retired a moment before is in none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from control_plane import registry
from control_plane.auth import approvals
from control_plane.desk import refuse_if_stopped
from control_plane.issuer import Placement, place
from control_plane.parts import Parts
from control_plane.scheduler import choose
from control_plane.store import approvals as requests
from control_plane.store import runs
from control_plane.store.db import reading
from interlock.errors import ApprovalRequired, NotFound
from interlock.order import Labels, LaunchOrder, Plan
from interlock.permit import Permit
from interlock.tier import PROFILES
from interlock.touched import resource_of


@dataclass(frozen=True)
class Requester:
    """Who launches: the subject (a person or an API key) and the person behind."""

    subject: str
    person: str
    tenant: str


def require_code(connection: Connection, plan: Plan) -> None:
    """Raise NotFound (``not_found.code``) when a code file of the plan was never uploaded."""
    missing = [name for name, digest in plan.code if not runs.has_code(connection, digest)]
    if missing:
        raise NotFound(f"the code file {missing[0]} was not uploaded", code="code",
                       next_step="POST /api/code first", details={"names": missing})


def labels_for(plan: Plan, who: Requester, run: str, node: str, lineage: tuple[str, ...] = ()) -> Labels:
    """Return the labels of an attempt; they come from here only, never from a node.

    Args: `lineage` the models that the run belongs to beside its own (`registry.labelled`).
    """
    return Labels(plan.tenant, who.subject, who.person, run, node, plan.tier, plan.model, lineage)


def prepare(parts: Parts, plan: Plan, who: Requester, run: str) -> Labels:
    """Check what needs no permission (code, versions, stop state, a node that may run it) and return the labels.

    Raises NotFound, Conflict, Denied (``denied.tier``, ``denied.serve``), Halted, Stale, Unavailable or LayerMissing.
    """
    with reading(parts.engine) as connection:
        require_code(connection, plan)
        parts.keys.require(plan)
        registry.require_weights(connection, plan, who.person)
        lineage = registry.labelled(connection, plan, run)
        standing = parts.desk.granting(connection)
        refuse_if_stopped(standing, labels_for(plan, who, run, "", lineage))
        labels = labels_for(plan, who, run, choose(connection, plan), lineage)
        refuse_if_stopped(standing, labels)
    return labels


def approvers(connection: Connection, approval: str, plan: Plan, who: Requester) -> tuple[str, ...]:
    """Return the persons whose approval of exactly this plan counts now; nobody without a matching request."""
    request = requests.one(connection, approval) if approval else None
    if request is None or (request.kind, request.digest, request.asked_by) != (
        approvals.LAUNCH, plan.digest(), who.person
    ):
        return ()
    approvals.check_open(request, None)
    return approvals.standing(connection, request).approvers


def ask_approval(connection: Connection, plan: Plan, who: Requester, refusal: ApprovalRequired) -> ApprovalRequired:
    """Leave an approval request behind and return the refusal that names it."""
    needed = max(PROFILES[plan.tier].launch_approvals, int(refusal.details.get("needed", 1)))
    request = approvals.ask(connection, kind=approvals.LAUNCH, body=plan.as_json(), tenant=plan.tenant,
                            asked_by=who.person, owner=who.person, needed=needed, life_s=plan.valid_s)
    given = approvals.standing(connection, request).given
    return ApprovalRequired(
        refusal.message, next_step=f"ask {needed} other person(s) for: interlock approve {request.id}",
        details={**refusal.details, "request": request.id, "needed": needed, "given": given, "bound": request.digest})


def start(
    parts: Parts, permit: Permit, plan: Plan, labels: Labels, facts: dict[str, Any], *, attempt: int = 1,
    approval: str = "", within: Callable[[Connection], None] | None = None,
) -> LaunchOrder:
    """Place one attempt with its permit. Raises what `issuer.place` and `registry.require_weights` raise."""
    placement = Placement(labels.run, attempt, labels, plan, facts, approval)

    def checked(placing: Connection) -> None:
        registry.require_weights(placing, plan, labels.owner)
        if within is not None:
            within(placing)

    key = parts.keys.mint(permit, plan, labels, attempt, parts.desk.epoch())

    def kept(connection: Connection) -> None:
        if key is not None:
            parts.keys.keep(connection, parts.ledger, key, labels.subject)

    return place(parts.desk, parts.signers, permit, placement, resource_of(plan).path, checked, kept)
