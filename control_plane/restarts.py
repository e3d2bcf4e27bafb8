"""Runs that failed start again by themselves: plans with `resume`, within their restart budget.

Rules:
1. Only what ended by its own fault: an exit status other than 0 or a signal, with the supervisor's proof that nothing
   of it lives. What a stop, a lost lease or a person ended stays ended.
2. The gate is asked again with what the store knows now: nobody is signed in, so there is no second factor.
3. A refusal that may pass (no node heard, a stop that came in between) is asked again for `RETRY_US`; any other, and
   that one then, is recorded and noted in the run's outcome, and the run stays ended.
4. Placing looks once more, in its own transaction, that the run is still where it ended: two that try at once make
   one attempt.
"""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row

from control_plane import admission
from control_plane.admission import Requester
from control_plane.auth import site
from control_plane.parts import Parts
from control_plane.store import people, runs, sessions
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Call, Subject
from interlock.errors import Conflict, Denied, NotRecorded, Refusal, Stale, Unavailable
from interlock.event import Event, EventType
from interlock.order import Labels, Plan, Result
from interlock.permit import Permit
from interlock.touched import resource_of
from policy.facts import Facts

RETRY_US = 30_000_000
LOOK_US = 2 * RETRY_US
MARK = "not_restarted"
_PASSING = (Unavailable, Stale, NotRecorded)


def failed(outcome: Mapping[str, Any]) -> bool:
    """Return whether an attempt ended by its own fault, and provably."""
    fault = outcome.get("exit") not in (None, 0) or outcome.get("signal") is not None
    return fault and outcome.get("why") == "ended" and outcome.get("result") == Result.CONFIRMED.value


def waits(row: Row[Any]) -> bool:
    """Return whether the run of `row` is about to be started again by itself."""
    if row.state != "ended" or not row.outcome or now_us() - row.ended_us > LOOK_US:
        return False
    outcome = json.loads(row.outcome)
    return MARK not in outcome and failed(outcome) and Plan.from_json(json.loads(row.plan)).resume


def refuse_spent(row: Row[Any], plan: Plan) -> None:
    """Refuse a restart of a run that is open, has no restart left, or whose plan is over. Raises Conflict."""
    if row.state in runs.OPEN:
        raise Conflict("the run is still open", code="run_open", next_step="stop it, or wait for its end")
    if row.attempt > plan.restarts:
        raise Conflict(f"the plan allows {plan.restarts} restart(s)", code="restarts", next_step="launch a new plan")
    if now_us() - row.created_us > plan.valid_s * 1_000_000:
        raise Conflict("the plan has expired", code="plan_expired", next_step="launch a new plan")


def turn(parts: Parts, faults: Mapping[str, str]) -> None:
    """Start what waits for it. Args: `faults` of the ticker: while the ledger can sign no head nothing new starts."""
    with reading(parts.engine) as connection:
        waiting = [r for r in runs.ended_since(connection, now_us() - LOOK_US) if waits(r)]
    if str(faults.get("tree", "")).startswith("conflict."):
        return
    for row in waiting:
        try:
            start(parts, row)
        except Refusal as refusal:
            passing = isinstance(refusal, _PASSING) or refusal.code == "stopped.epoch"
            if not passing or now_us() - row.ended_us > RETRY_US:
                _give_up(parts, row, refusal)


def start(parts: Parts, row: Row[Any]) -> int:
    """Place the next attempt of a run that failed; return its number.

    Raises what the gate, `admission.prepare` and `admission.start` raise, and Conflict (``conflict.restarted``) when
    another was faster.
    """
    plan = Plan.from_json(json.loads(row.plan))
    refuse_spent(row, plan)
    labels = admission.prepare(parts, plan, Requester(row.subject, row.owner, row.tenant), row.id)
    with reading(parts.engine) as connection:
        _require_alive(connection, row)
        roles = people.roles_of(connection, row.owner, row.tenant)
        facts = Facts(roles=roles, bundle_age_ms=0, state=site.state(connection), own=True)
    subject = Subject(row.subject, row.tenant, "person" if row.subject == row.owner else "service", row.owner)
    about = resource_of(plan, labels.lineage)
    permit = parts.gate.ask(Call(Action.RESTART, subject, about, row.id, plan.digest()), facts)
    number = int(row.attempt) + 1

    def still(connection: Connection) -> None:
        require_unmoved(connection, row)
        _require_alive(connection, row)
        record(parts, connection, row, labels, permit, "control")

    told = {"roles": sorted(roles), "mfa_age_ms": None, "mfa_bound": "", "approvals": [], "own": True}
    admission.start(parts, permit, plan, labels, told, attempt=number, approval=row.approval, within=still)
    return number


def record(
    parts: Parts, connection: Connection, row: Row[Any], labels: Labels, permit: Permit, by: str
) -> None:
    """Record that the next attempt of `row` is placed, in the transaction that places it."""
    parts.ledger.record(Event(EventType.RUN_RESTARTED, by, row.tenant, row.id, facts={
        "attempt": int(row.attempt) + 1, "after": _ended_by(json.loads(row.outcome or "{}")), "node": labels.node,
        "plan": row.plan_digest, "record": permit.record}), connection)


def require_unmoved(connection: Connection, row: Row[Any]) -> None:
    """Refuse when the run is not any more what `row` says; for the transaction that places an attempt.

    Raises Conflict (``conflict.restarted``).
    """
    now = runs.one(connection, row.id)
    if now is None or (now.state, now.attempt, now.outcome) != (row.state, row.attempt, row.outcome):
        raise Conflict("the run was started again meanwhile", code="restarted", next_step="see interlock runs")


def _require_alive(connection: Connection, row: Row[Any]) -> None:
    """Refuse for a disabled owner, and for an API key that was revoked or is too old. Raises Denied."""
    if runs.disabled(connection, row.owner):
        raise Denied("the owner of this run is disabled", code="owner", next_step="launch it anew as somebody else")
    if row.subject == row.owner:
        return
    key = sessions.key_of(connection, row.subject)
    if key is None or key.revoked_us or now_us() >= key.expires_us:
        raise Denied("the API key that launched this run is not valid any more", code="api_key",
                     next_step="launch it anew with a live key")


def _ended_by(outcome: Mapping[str, Any]) -> dict[str, Any]:
    return {name: outcome[name] for name in ("exit", "signal") if outcome.get(name) is not None}


def _give_up(parts: Parts, row: Row[Any], refusal: Refusal) -> None:
    """Note in the run that it stays ended, and why; whoever was faster with a new attempt leaves nothing to note."""
    outcome = json.dumps({**json.loads(row.outcome), MARK: refusal.code})
    with writing(parts.engine) as connection:
        if runs.note_outcome(connection, row.id, row.attempt, row.outcome, outcome):
            parts.ledger.record(Event(EventType.RUN_REFUSED, "control", row.tenant, row.id, facts={
                "code": refusal.code, "attempt": int(row.attempt) + 1, "plan": row.plan_digest, "by": "restart"},
            ), connection)
    parts.bell.ring()
