"""Launch, list, follow and restart runs; upload code."""

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import StringConstraints
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from control_plane import admission, registry, restarts
from control_plane.admission import Requester
from control_plane.api import looking
from control_plane.api.context import (
    Body,
    Caller,
    SignedIn,
    declare,
    facts_of,
    pass_gate,
    shown_proof,
    signed_in,
    spend_proof,
)
from control_plane.auth import approvals
from control_plane.parts import Parts, parts_of
from control_plane.store import runs
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Resource, new_id
from interlock.canon import digest_bytes
from interlock.errors import ApprovalRequired, Conflict, Denied, Halted, Malformed, Refusal, Unavailable
from interlock.event import Event, EventType
from interlock.order import Labels, Plan, check_new
from interlock.tier import Tier
from interlock.touched import dataset_of, resource_of

router = APIRouter()
MAX_CODE, MAX_CODE_PERSON = 1 << 20, 256 << 20
MAX_WAIT_S, RECHECK_S = 30, 5.0

declare({
    ("POST", "/api/code"): Action.LAUNCH,
    ("POST", "/api/runs"): Action.LAUNCH,
    ("GET", "/api/runs"): Action.LOOK,
    ("GET", "/api/runs/{run}"): Action.LOOK,
    ("GET", "/api/runs/{run}/output"): Action.LOOK,
    ("GET", "/api/runs/{run}/files"): Action.LOOK,
    ("GET", "/api/runs/{run}/files/{name}"): Action.LOOK,
    ("POST", "/api/runs/{run}/restart"): Action.RESTART,
})

Id = Annotated[str, StringConstraints(max_length=64)]


class RunBody(Body):
    """`plan` as docs/formats/launch-order.md; `step_up` and `approval` where an earlier answer asked for them."""

    plan: dict[str, Any]
    step_up: Id | None = None
    approval: Id | None = None


class RestartBody(Body):
    """`step_up` where policy asks for a factor at a restart."""

    step_up: Id | None = None


def requester(caller: Caller) -> Requester:
    """Return who launches."""
    return Requester(caller.id, caller.person, caller.tenant)


@router.post("/api/code")
async def upload(request: Request, caller: SignedIn) -> dict[str, str]:
    """Keep a code file under its digest (raw bytes, at most 1 MiB)."""
    caller.require_scope(Action.LAUNCH)
    data = await request.body()
    if not 0 < len(data) <= MAX_CODE:
        raise Malformed("a code file has 1 byte to 1 MiB", code="size")
    digest = digest_bytes(data)

    def keep() -> None:
        with writing(parts_of(request).engine) as connection:
            fresh = not runs.has_code(connection, digest)
            if fresh and runs.code_size(connection, caller.person) + len(data) > MAX_CODE_PERSON:
                raise Conflict(f"you keep more than {MAX_CODE_PERSON >> 20} MiB of code files", code="code_quota",
                               next_step="use files that were uploaded before, or put large ones into a data set")
            runs.put_code(connection, digest, data, caller.person, now_us())

    await run_in_threadpool(keep)
    return {"digest": digest}


@dataclass(frozen=True)
class Wanted:
    """A first attempt that is asked for: the plan, what the gate is asked (launch, or serve of an engine), the proof
    of a second factor, the persons who approved, and what uses their approval up (in the transaction that places)."""

    plan: Plan
    action: Action
    step_up: str | None = None
    persons: tuple[str, ...] = ()
    approval: str = ""
    spend: Callable[[Connection], object] | None = None


@router.post("/api/runs", status_code=201)
def launch(request: Request, caller: SignedIn, body: RunBody) -> dict[str, Any]:
    """Admit a plan and place its first attempt."""
    plan = Plan.from_json(body.plan)
    check_new(plan)
    if plan.serve:
        parts_of(request).desk.note_rarely(f"serve {caller.person}", Event(
            EventType.RUN_REFUSED, caller.id, caller.tenant, facts={"code": "denied.serve", "plan": plan.digest()}))
        raise Denied("an engine is started from an approved version, not from a plan", code="serve",
                     next_step="interlock model serve NAME")
    return placed(request, caller, lambda: _wanted(request, caller, plan, body))


def _wanted(request: Request, caller: Caller, plan: Plan, body: RunBody) -> Wanted:
    who, approval, bound = requester(caller), body.approval or "", plan.digest()
    with reading(parts_of(request).engine) as connection:
        persons = admission.approvers(connection, approval, plan, who)

    def spend(connection: Connection) -> None:
        approvals.use(connection, approval, kind=approvals.LAUNCH, bound=bound, asked_by=who.person)

    return Wanted(plan, Action.LAUNCH, body.step_up, persons, approval if persons else "", spend if persons else None)


def placed(request: Request, caller: Caller, wanted: Callable[[], Wanted]) -> dict[str, Any]:
    """Admit what `wanted` returns and place it; asked a second time when a stop came in between.

    Raises what admission, gate and registry raise.
    """
    _require_evidence(request)
    run = new_id("run")
    try:
        return _place(request, caller, wanted(), run)
    except Halted as refusal:
        if refusal.code != "stopped.epoch":
            raise
        return _place(request, caller, wanted(), run)


def _require_evidence(request: Request) -> None:
    """Refuse new work while the ledger can sign no head: nobody could verify what it leaves. Raises Unavailable."""
    fault = str(getattr(request.app.state, "faults", {}).get("tree", ""))
    if fault.startswith("conflict."):
        raise Unavailable(f"the ledger signs no tree head ({fault}), so no new work starts", code="evidence",
                          next_step="docs/runbooks/restore.md; stops, approvals and looking go on")


def _place(request: Request, caller: Caller, wanted: Wanted, run: str) -> dict[str, Any]:
    parts, plan, who, persons = parts_of(request), wanted.plan, requester(caller), wanted.persons
    bound, proof = plan.digest(), shown_proof(request, caller, wanted.step_up, wanted.action, plan.digest())
    facts = facts_of(request, caller, approvals=len(persons), proof=proof)
    try:
        _allowed(request, caller, plan, run, len(persons))
        labels = _prepared(parts, caller, plan, who, run)
        permit = pass_gate(request, caller, wanted.action, resource_of(plan, labels.lineage), bound=bound, run=run,
                           step_up=wanted.step_up, approvals=len(persons), spend=False)
    except ApprovalRequired as refusal:
        if wanted.action is not Action.LAUNCH:
            raise
        raise _asked(parts, caller, plan, who, refusal) from None
    told = {"roles": sorted(facts.roles), "mfa_age_ms": facts.mfa_age_ms, "mfa_bound": facts.mfa_bound,
            "approvals": list(persons)}

    def spend(connection: Connection) -> None:
        spend_proof(connection, proof)
        if wanted.spend is not None:
            wanted.spend(connection)
        parts.ledger.record(Event(EventType.RUN_GRANTED, caller.id, caller.tenant, run, facts={
            "plan": bound, "node": labels.node, "attempt": 1, "tier": plan.tier.value, "approvers": list(persons),
            "record": permit.record}), connection)

    order = admission.start(parts, permit, plan, labels, told, approval=wanted.approval, within=spend)
    return {"run": run, "state": "placed", "node": labels.node, "attempt": 1, "epoch": order.epoch, "plan": bound}


def _allowed(request: Request, caller: Caller, plan: Plan, run: str, given: int) -> None:
    """Ask the gate for every dataset and every version that is there; a launch that reads what it may not is none."""
    for dataset in plan.datasets:
        pass_gate(request, caller, Action.READ_DATA, dataset_of(plan, dataset), bound=plan.digest(), run=run,
                  approvals=given)
    with reading(parts_of(request).engine) as connection:
        loaded = registry.loaded(connection, plan)
    for version in loaded:
        pass_gate(request, caller, Action.LOAD, registry.resource_of(version), bound=plan.digest(), run=run,
                  approvals=given)


def _prepared(parts: Parts, caller: Caller, plan: Plan, who: Requester, run: str) -> Labels:
    """Prepare, and leave a record of a refusal (the gate records its own)."""
    try:
        return admission.prepare(parts, plan, who, run)
    except Refusal as refusal:
        parts.desk.note(Event(EventType.RUN_REFUSED, caller.id, caller.tenant, run, facts={
            "code": refusal.code, "plan": plan.digest(), "tier": plan.tier.value}))
        raise


def _asked(parts: Parts, caller: Caller, plan: Plan, who: Requester, refusal: ApprovalRequired) -> ApprovalRequired:
    with writing(parts.engine) as connection:
        asked = admission.ask_approval(connection, plan, who, refusal)
        parts.ledger.record(Event(EventType.APPROVAL_ASKED, caller.id, caller.tenant, facts={
            "request": asked.details["request"], "kind": "launch", "digest": plan.digest(),
            "tier": plan.tier.value, "needed": asked.details["needed"]}), connection)
    return asked


@router.post("/api/runs/{run}/restart", status_code=201)
def restart(request: Request, caller: SignedIn, run: Id, body: RestartBody | None = None) -> dict[str, Any]:
    """Place a new attempt inside the plan's restart budget; the gate is asked again, no new person is."""
    parts = parts_of(request)
    row = _row(request, caller, run)
    _require_evidence(request)
    plan, number = Plan.from_json(json.loads(row.plan)), int(row.attempt) + 1
    _may_restart(caller, row, plan)
    who = Requester(row.subject, row.owner, row.tenant)
    labels = _prepared(parts, caller, plan, who, run)
    step_up = body.step_up if body else None
    permit = pass_gate(request, caller, Action.RESTART, resource_of(plan, labels.lineage), bound=plan.digest(), run=run,
                       step_up=step_up, own=True)
    facts = facts_of(request, caller)
    told = {"roles": sorted(facts.roles), "mfa_age_ms": facts.mfa_age_ms, "mfa_bound": "", "approvals": []}

    def still(connection: Connection) -> None:
        restarts.require_unmoved(connection, row)
        restarts.record(parts, connection, row, labels, permit, caller.id)

    order = admission.start(parts, permit, plan, labels, told, attempt=number, approval=row.approval, within=still)
    return {"run": run, "state": "placed", "node": labels.node, "attempt": number, "epoch": order.epoch}


def _may_restart(caller: Caller, row: Any, plan: Plan) -> None:
    if row.owner != caller.person:
        raise looking.unseen("run")
    restarts.refuse_spent(row, plan)


def shown(row: Any) -> dict[str, Any]:
    """Return a run's row as JSON."""
    plan = json.loads(row.plan)
    return {
        "run": row.id, "state": row.state, "tier": row.tier, "owner": row.owner, "subject": row.subject,
        "tenant": row.tenant, "model": row.model, "node": row.node, "attempt": row.attempt, "argv": plan["argv"],
        "plan_digest": row.plan_digest, "approval": row.approval, "created_us": row.created_us,
        "ended_us": row.ended_us, "outcome": json.loads(row.outcome) if row.outcome else None,
    }


def _row(request: Request, caller: Caller, run: str) -> Any:
    """Return the run's row when the caller may see it; raises NotFound."""
    with reading(parts_of(request).engine) as connection:
        row = runs.one(connection, run)
    if row is None:
        raise looking.unseen("run")
    looking.require(request, caller, _resource(row), own=row.owner == caller.person)
    return row


def _resource(row: Any) -> Resource:
    return Resource("run", row.id, row.tenant, Tier(row.tier))


def visible(request: Request, caller: Caller, limit: int) -> list[dict[str, Any]]:
    """Return the newest runs that the caller may see: his own, and those of each tenant and tier he may look at."""
    looking.may(request, caller, Resource("run", "own", caller.tenant), own=True)
    with reading(parts_of(request).engine) as connection:
        kinds = runs.kinds(connection)
    seen = [(t, w) for t, w in kinds if looking.may(request, caller, Resource("run", "all", t, Tier(w)))]
    with reading(parts_of(request).engine) as connection:
        return [shown(r) for r in runs.newest(connection, limit, caller.person, seen)]


@router.get("/api/runs")
def listing(request: Request, caller: SignedIn, limit: Annotated[int, Query(ge=1, le=1000)] = 200) -> dict[str, Any]:
    """List runs, newest first: one's own, and of others what one may look at."""
    return {"runs": visible(request, caller, limit)}


@router.get("/api/runs/{run}")
def one(request: Request, caller: SignedIn, run: Id) -> dict[str, Any]:
    """Show one run with its attempts."""
    row = _row(request, caller, run)
    with reading(parts_of(request).engine) as connection:
        attempts = runs.attempts_of(connection, run)
    return {**shown(row), "plan": json.loads(row.plan), "attempts": [
        {"attempt": a.attempt, "node": a.node, "state": a.state, "epoch": a.epoch, "granted_us": a.granted_us,
         "live_us": a.live_us, "lease_us": a.lease_us, "ended_us": a.ended_us,
         "outcome": json.loads(a.outcome) if a.outcome else None} for a in attempts]}


@router.get("/api/runs/{run}/output")
async def output(
    request: Request, caller: SignedIn, run: Id, after: Annotated[int, Query(ge=0, le=2**53)] = 0,
    wait: Annotated[int, Query(ge=0, le=MAX_WAIT_S)] = 0, attempt: Annotated[int, Query(ge=0, le=10_000)] = 0,
) -> dict[str, Any]:
    """Return output from `after` on, of `attempt` (0: the newest); with `wait`, hold the answer until there is
    something new. `attempt` of the answer is the newest: who follows an older one that has told all goes on to it."""
    parts = parts_of(request)
    await run_in_threadpool(_row, request, caller, run)
    until = time.monotonic() + wait
    while True:
        rung = parts.bell.count
        found = await run_in_threadpool(_piece, parts, run, attempt, after)
        left = until - time.monotonic()
        if found["data"] or found["ended"] or left <= 0 or attempt not in (0, found["attempt"]):
            return found
        await parts.bell.heard(rung, min(left, RECHECK_S))
        await run_in_threadpool(_still, request, run)


def _still(request: Request, run: str) -> None:
    """Refuse whoever was disabled, signed out or lost the role while he waited."""
    _row(request, signed_in(request), run)


def _piece(parts: Parts, run: str, attempt: int, after: int) -> dict[str, Any]:
    with reading(parts.engine) as connection:
        row = runs.one(connection, run)
    assert row is not None
    data, following = parts.output.read(run, attempt or row.attempt, after)
    over = row.state in (*runs.OVER, "lost") and attempt in (0, row.attempt)
    ended = over and not data and not restarts.waits(row)
    return {"data": base64.b64encode(data).decode(), "next": following, "ended": ended, "state": row.state,
            "attempt": row.attempt, "outcome": json.loads(row.outcome) if row.outcome else None}


@router.get("/api/runs/{run}/files")
def files(request: Request, caller: SignedIn, run: Id) -> dict[str, Any]:
    """List the files that the run's latest attempt left."""
    row = _row(request, caller, run)
    return {"files": parts_of(request).output.files(run, row.attempt)}


@router.get("/api/runs/{run}/files/{name}")
def file(request: Request, caller: SignedIn, run: Id, name: str) -> Response:
    """Return one file's bytes; a browser saves it and never shows it."""
    row = _row(request, caller, run)
    data = parts_of(request).output.file(run, row.attempt, name)
    return Response(data, media_type="application/octet-stream", headers={
        "content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"})
