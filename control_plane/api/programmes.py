"""Partner programmes: who is a member, until when. Safety officers enrol, each time with a fresh code."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints

from control_plane.api import looking
from control_plane.api.context import Body, Caller, SignedIn, declare, pass_gate
from control_plane.api.whoami import Code, proved
from control_plane.parts import Parts, parts_of
from control_plane.store import people, programmes
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Resource
from interlock.canon import digest
from interlock.errors import Denied, NotFound
from interlock.event import Event, EventType

router = APIRouter()
MAX_DAYS = 365
_DAY_US = 86_400_000_000

declare({
    ("GET", "/api/programmes"): Action.LOOK,
    ("POST", "/api/programmes/{name}/members"): Action.ENROL_PARTNER,
    ("DELETE", "/api/programmes/{name}/members/{person}"): Action.ENROL_PARTNER,
})

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
Person = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class MemberBody(Body):
    """`person` by name or id; `days` from now; `code` of the officer's second factor, for exactly this."""

    person: Person
    organisation: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    days: Annotated[int, Field(ge=1, le=MAX_DAYS)]
    code: Code


class EndBody(Body):
    """`code` where the last one of this session is too old."""

    code: Code | None = None


@router.get("/api/programmes")
def listing(request: Request, caller: SignedIn) -> dict[str, Any]:
    """List memberships: one's own, and all of them for whoever may look at programmes."""
    looking.may(request, caller, Resource("programme", "own", caller.tenant), own=True)
    with reading(parts_of(request).engine) as connection:
        rows, now = programmes.every(connection), now_us()
    tenants = {row.tenant for row in rows}
    seen = {t for t in tenants if looking.may(request, caller, Resource("programme", "all", t))}
    return {"members": [{
        "programme": row.programme, "person": row.person, "name": row.name, "organisation": row.organisation,
        "until_us": row.until_us, "by": row.by, "at_us": row.at_us, "state": _state(row, now),
    } for row in rows if row.person == caller.person or row.tenant in seen]}


def _state(row: Any, now: int) -> str:
    if row.ended_us:
        return "ended"
    if row.until_us <= now:
        return "expired"
    return "disabled" if row.disabled else "live"


@router.post("/api/programmes/{name}/members")
def enrol(request: Request, caller: SignedIn, name: Name, body: MemberBody) -> dict[str, Any]:
    """Enrol a person into a programme, or give his membership a new end."""
    caller.require_person()
    parts = parts_of(request)
    person = _person(parts, body.person)
    _other(caller, person)
    bound = digest({"programme": name, "person": person.id, "organisation": body.organisation, "days": body.days})
    proof = proved(request, caller, body.code, Action.ENROL_PARTNER, bound)
    pass_gate(request, caller, Action.ENROL_PARTNER, Resource("programme", name, person.tenant), bound=bound,
              step_up=proof)
    now = now_us()
    until = now + body.days * _DAY_US
    with writing(parts.engine) as connection:
        fresh = programmes.put_member(connection, name, person.id, organisation=body.organisation, until_us=until,
                                      by=caller.person, now_us=now)
        _record(parts, connection, caller, name, person.id, joined=True, organisation=body.organisation,
                until_us=until, new=fresh)
    return {"programme": name, "person": person.id, "name": person.name, "organisation": body.organisation,
            "until_us": until}


@router.delete("/api/programmes/{name}/members/{person}")
def end(
    request: Request, caller: SignedIn, name: Name, person: Person, body: EndBody | None = None
) -> dict[str, Any]:
    """End a membership at once; nodes hear of it with their next snapshot."""
    caller.require_person()
    parts = parts_of(request)
    member = _person(parts, person, member=True)
    bound, proof = digest({"programme": name, "person": member.id, "end": True}), None
    if body is not None and body.code is not None:
        proof = proved(request, caller, body.code, Action.ENROL_PARTNER, bound)
    pass_gate(request, caller, Action.ENROL_PARTNER, Resource("programme", name, member.tenant), bound=bound,
              step_up=proof)
    with writing(parts.engine) as connection:
        if not programmes.end_member(connection, name, member.id, now_us()):
            raise NotFound("no such live membership", code="member", next_step="interlock partner list")
        _record(parts, connection, caller, name, member.id, joined=False)
    return {"programme": name, "person": member.id, "name": member.name, "ended": True}


def _person(parts: Parts, named: str, *, member: bool = False) -> people.Person:
    """Return the person of that name or id; to join he must have enrolled. Raises NotFound (``not_found.person``)."""
    with reading(parts.engine) as connection:
        found = people.by_name(connection, named) or people.by_id(connection, named)
    if found is None or not (found.enrolled or member):
        raise NotFound("no such enrolled person", code="person", next_step="interlock people")
    return found


def _other(caller: Caller, person: people.Person) -> None:
    if person.id == caller.person:
        raise Denied("nobody enrols himself into a programme", code="self_approval",
                     next_step="ask another safety officer")


def _record(parts: Parts, connection: Any, caller: Caller, name: str, person: str, **facts: Any) -> None:
    parts.ledger.record(Event(EventType.PARTNER_ENROLLED, caller.person, caller.tenant, facts={
        "programme": name, "person": person, **facts, "source_ip": caller.source_ip}), connection)
