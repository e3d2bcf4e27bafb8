"""Approval requests: what waits, what exactly it is, approve or refuse with a fresh code."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import StringConstraints

from control_plane import trust_list
from control_plane.api import looking
from control_plane.api.context import Body, Caller, SignedIn, declare, pass_gate, site_of
from control_plane.api.whoami import Code, proved
from control_plane.auth import approvals
from control_plane.store import approvals as rows
from control_plane.store import people
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Resource
from interlock.event import Event, EventType
from interlock.tier import Tier

router = APIRouter()

declare({
    ("GET", "/api/approvals"): Action.LOOK,
    ("GET", "/api/approvals/{approval}"): Action.LOOK,
    ("POST", "/api/approvals/{approval}/approve"): Action.APPROVE,
    ("POST", "/api/approvals/{approval}/refuse"): Action.APPROVE,
})


_TIERED = (approvals.LAUNCH, approvals.VERSION)  # their bodies name a tier


class VoteBody(Body):
    """`signed` is this person's Signed approval, for a resume or a change of trust only."""

    code: Code
    reason: Annotated[str, StringConstraints(max_length=1000)] = ""
    signed: dict[str, Any] | None = None


def action_of(kind: str) -> Action:
    """Return the action that a vote on this kind of request is."""
    return Action.RESUME if kind == approvals.RESUME else Action.APPROVE


def _resource(request: rows.Request) -> Resource:
    named = request.body.get("tier") if request.kind in _TIERED else None
    tier = Tier(named) if named in {t.value for t in Tier} else Tier.NONE
    return Resource("approval", request.id, request.tenant, tier)


def head_of(request: Request, kind: str) -> str | None:
    """Return what requests of this kind are bound to now: the trust list in force, else the order log's head.

    None when no order desk is there (then bound requests are refused).
    """
    if kind == approvals.TRUST:
        with reading(site_of(request).engine) as connection:
            return trust_list.newest(connection).head
    desk = getattr(request.app.state, "desk", None)
    return None if desk is None else str(desk.head())


def _state(one: rows.Request) -> str:
    return "expired" if one.state == rows.OPEN and now_us() >= one.expires_us else one.state


def _row(standing: approvals.Standing, names: dict[str, str]) -> dict[str, Any]:
    one = standing.request
    return {
        "id": one.id, "kind": one.kind, "digest": one.digest, "tenant": one.tenant, "reason": one.reason,
        "asked_by": one.asked_by, "asked_by_name": names.get(one.asked_by, one.asked_by), "owner": one.owner,
        "asked_us": one.asked_us, "expires_us": one.expires_us, "state": _state(one), "needed": one.needed,
        "given": standing.given, "missing": standing.missing,
    }


@router.get("/api/approvals")
def listing(request: Request, caller: SignedIn) -> dict[str, Any]:
    """List requests, newest first: one's own, and of others what one may look at."""
    looking.may(request, caller, Resource("approval", "own", caller.tenant), own=True)
    with reading(site_of(request).engine) as connection:
        every = {r.id: r for r in (*rows.newest(connection), *rows.newest(connection, asked_by=caller.person))}
    found = sorted((r for r in every.values() if _seen(request, caller, r)), key=lambda r: -r.asked_us)
    with reading(site_of(request).engine) as connection:
        names = {r.asked_by: _name(connection, r.asked_by) for r in found}
        shown = [_row(approvals.standing(connection, r), names) for r in found]
        for row, one in zip(shown, found, strict=True):
            row["you_cannot"] = approvals.why_not(connection, one, caller.person)
    return {"approvals": shown}


def _seen(request: Request, caller: Caller, one: rows.Request) -> bool:
    of = _resource(one)
    mine = caller.person in (one.asked_by, one.owner)
    return mine or looking.may(request, caller, Resource("approval", "all", of.tenant, of.tier))


def _name(connection: Any, person: str) -> str:
    one = people.by_id(connection, person)
    return one.name if one else person


@router.get("/api/approvals/{approval}")
def one(request: Request, caller: SignedIn, approval: str) -> dict[str, Any]:
    """Show one request: its body, digest, votes, what is missing, and why you cannot vote."""
    with reading(site_of(request).engine) as connection:
        found = approvals.found(connection, approval)
    looking.require(request, caller, _resource(found), own=caller.person in (found.asked_by, found.owner))
    with reading(site_of(request).engine) as connection:
        standing = approvals.standing(connection, found)
        votes = [
            {"person": v.person, "name": v.name, "approve": v.approve, "reason": v.reason, "at_us": v.at_us,
             "counts": v.person in standing.approvers}
            for v in rows.votes(connection, approval)
        ]
        return {
            **_row(standing, {found.asked_by: _name(connection, found.asked_by)}), "body": found.body,
            "head": found.head, "votes": votes, "void": [{"person": p, "why": w} for p, w in standing.void],
            "you_cannot": approvals.why_not(connection, found, caller.person),
        }


@router.post("/api/approvals/{approval}/approve")
def approve(request: Request, caller: SignedIn, approval: str, body: VoteBody) -> dict[str, Any]:
    """Approve exactly what the request's digest says."""
    return cast(request, caller, approval, body, approve=True)


@router.post("/api/approvals/{approval}/refuse")
def refuse(request: Request, caller: SignedIn, approval: str, body: VoteBody) -> dict[str, Any]:
    """Refuse; one refusal ends the request."""
    return cast(request, caller, approval, body, approve=False)


def cast(request: Request, caller: Caller, approval: str, body: VoteBody, *, approve: bool) -> dict[str, Any]:
    """Cast one vote: may this person, is the code fresh, does the gate agree; then vote and record as one."""
    caller.require_person()
    site = site_of(request)
    with reading(site.engine) as connection:
        found = approvals.found(connection, approval)
        approvals.check_voter(connection, found, caller.person)
    head = head_of(request, found.kind)
    approvals.check_open(found, head)
    action = action_of(found.kind)
    proof = proved(request, caller, body.code, action, found.digest)
    pass_gate(request, caller, action, _resource(found), bound=found.digest, step_up=proof)
    with writing(site.engine) as connection:
        person = people.by_id(connection, caller.person)
        assert person is not None
        now = approvals.vote(
            connection, approvals.found(connection, approval), person, approve=approve, reason=body.reason,
            signed=body.signed, head=head,
        )
        site.ledger.record(_event(caller, now, body.reason, approve=approve), connection)
    answer = {"id": approval, "state": now.request.state, "given": now.given, "needed": now.request.needed,
              "missing": now.missing}
    return {**answer, **_after(request, now)}


def _event(caller: Caller, now: approvals.Standing, reason: str, *, approve: bool) -> Event:
    kind = EventType.APPROVAL_GIVEN if approve else EventType.APPROVAL_REFUSED
    if approve and now.request.kind == approvals.RESUME:
        kind = EventType.RESUME_SIGNED
    facts = {"request": now.request.id, "digest": now.request.digest, "kind": now.request.kind, "given": now.given,
             "needed": now.request.needed, "reason": reason, "source_ip": caller.source_ip}
    return Event(kind, caller.person, caller.tenant, facts=facts)


def _after(request: Request, now: approvals.Standing) -> dict[str, Any]:
    """Let the order desk act on a request that has all its votes (`app.state.approved`); it asks everything again."""
    act = getattr(request.app.state, "approved", None)
    if act is None or now.missing or now.request.state != rows.OPEN:
        return {}
    return {"effect": act(now)}
