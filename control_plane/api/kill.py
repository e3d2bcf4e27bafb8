"""The stop, its proof, and asking for a resume.

The stop route asks the small always-loaded rule and nothing else: no bundle, no gate, no approvals, no ledger.
"""

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field, StringConstraints
from starlette.concurrency import run_in_threadpool

from control_plane import proof, resume
from control_plane.api import looking
from control_plane.api.context import (
    Body,
    Caller,
    SignedIn,
    caller_of,
    credential_of,
    declare,
    pass_gate,
)
from control_plane.auth import approvals
from control_plane.lane import aside
from control_plane.parts import Parts, parts_of
from control_plane.store import orders, runs
from control_plane.store.db import reading, writing
from interlock.call import Action, Resource
from interlock.errors import Denied, Refusal
from interlock.event import Event, EventType
from interlock.order import Scope, ScopeKind
from policy.stop_rule import require_stop

router = APIRouter()
MAX_WAIT_S, MAX_REASON = 30, 1000

declare({
    ("POST", "/api/stop"): Action.STOP,
    ("GET", "/api/stops"): Action.LOOK,
    ("GET", "/api/stops/{order}"): Action.LOOK,
    ("POST", "/api/resumes"): Action.RESUME,
})

Id = Annotated[str, StringConstraints(max_length=64)]
Reason = Annotated[str, StringConstraints(max_length=1000)]


class StopBody(Body):
    """`scope` is ``everything``, ``run:ID``, ``tenant:T``, ``subject:S``, ``model:M`` or ``node:N``."""

    scope: Annotated[str, StringConstraints(min_length=1, max_length=300)]
    reason: str = ""


class ResumeBody(Body):
    """`clears` are ids of stops in force; a resume lifts exactly these."""

    clears: Annotated[list[Id], Field(min_length=1, max_length=64)]
    reason: Reason


async def stopping(request: Request) -> Caller:
    """Return who gives a stop: nothing is written, and no thread of the common pool is waited for."""
    return await aside(lambda: caller_of(request, credential_of(request), note=False))


@router.post("/api/stop")
async def stop(request: Request, caller: Annotated[Caller, Depends(stopping)], body: StopBody) -> dict[str, Any]:
    """Accept a stop order. One person, no second factor; answered when this replica has it on disk."""
    return await aside(lambda: accept(parts_of(request), caller, body.scope, body.reason))


def accept(parts: Parts, caller: Caller, words: str, reason: str) -> dict[str, Any]:
    """Stop for this caller (the console's button calls it too). Raises Malformed or Denied (``denied.stop``)."""
    scope = Scope.parse(words)
    caller.require_scope(Action.STOP)
    require_stop(caller.roles, _owns(parts, caller, scope), caller.kind, scope)
    accepted = parts.desk.accept_stop(scope, caller.person, plain(reason))
    return {"order": accepted.order.id, "epoch": accepted.order.epoch, "anchored": accepted.anchored,
            "scope": str(scope)}


def plain(reason: str) -> str:
    """Return a reason as it can be kept anywhere; a stop is never refused for its words."""
    return reason.encode(errors="replace").decode().replace("\0", " ")[:MAX_REASON]


def _owns(parts: Parts, caller: Caller, scope: Scope) -> bool:
    if scope.kind is ScopeKind.SUBJECT:
        return scope.id in (caller.id, caller.person)
    if scope.kind is not ScopeKind.RUN:
        return False
    try:
        with reading(parts.engine) as connection:
            row = runs.one(connection, scope.id)
    except Refusal:
        return False
    return row is not None and row.owner == caller.person


@router.get("/api/stops")
def listing(request: Request, caller: SignedIn) -> dict[str, Any]:
    """List stops, newest first, each with its proof."""
    parts = parts_of(request)
    looking.require(request, caller, Resource("stop", "all", caller.tenant), own=True)
    with reading(parts.engine) as connection:
        return {"stops": [_report(parts, connection, row) for row in orders.stops(connection)]}


def _report(parts: Parts, connection: Any, row: Any) -> dict[str, Any]:
    return proof.of_row(parts.desk, connection, row, silent_ms=parts.settings.silent_ms,
                        unconfirmed_ms=parts.settings.unconfirmed_ms)


@router.get("/api/stops/{order}")
async def one(
    request: Request, caller: SignedIn, order: Id, wait: Annotated[int, Query(ge=0, le=MAX_WAIT_S)] = 0
) -> dict[str, Any]:
    """Show one stop; with `wait`, hold the answer until its state is settled."""
    parts = parts_of(request)
    await run_in_threadpool(looking.require, request, caller, Resource("stop", order, caller.tenant), own=True)
    until = time.monotonic() + wait
    while True:
        rung = parts.bell.count
        found = await run_in_threadpool(_one, parts, order)
        left = until - time.monotonic()
        if found["state"] != "pending" or left <= 0:
            return found
        await parts.bell.heard(rung, min(left, 1.0))


def _one(parts: Parts, order: str) -> dict[str, Any]:
    with reading(parts.engine) as connection:
        return proof.report(parts.desk, connection, order, silent_ms=parts.settings.silent_ms,
                            unconfirmed_ms=parts.settings.unconfirmed_ms)


@router.post("/api/resumes")
def ask_resume(request: Request, caller: SignedIn, body: ResumeBody) -> dict[str, Any]:
    """Ask for a resume. Asking lifts nothing: two officers who neither stopped nor own a run must sign it."""
    parts = parts_of(request)
    caller.require_person()
    if not caller.roles & {"on_call", "safety_officer"}:
        raise Denied("on-call or a safety officer asks for a resume", code="no_role",
                     next_step="ask the person on call")
    pass_gate(request, caller, Action.LOOK, Resource("stop", "all", caller.tenant), own=True)
    question = resume.ask(parts.desk, approvals.new_request_id(), body.clears, parts.settings.cooldown_ms)
    with writing(parts.engine) as connection:
        made = approvals.ask(
            connection, kind=approvals.RESUME, body=question.body(), tenant=caller.tenant, asked_by=caller.person,
            owner="", needed=resume.THRESHOLD, reason=body.reason, head=question.head, request=question.request)
        parts.ledger.record(Event(EventType.RESUME_ASKED, caller.person, caller.tenant, facts={
            "request": made.id, "clears": list(question.clears), "reason": body.reason}), connection)
    return {"request": made.id, "digest": made.digest, "body": made.body, "head": made.head, "needed": made.needed}
