"""Who nodes believe when a stop is resumed: see it, and ask for a change of it."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints

from control_plane import trust_change, trust_list
from control_plane.api.context import Body, SignedIn, declare, pass_gate
from control_plane.auth import approvals
from control_plane.parts import Parts, parts_of
from control_plane.store import approvals as rows
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Resource
from interlock.event import Event, EventType

router = APIRouter()

declare({("GET", "/api/trust"): Action.LOOK, ("POST", "/api/trust/changes"): Action.CHANGE_TRUST})

Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Names = Annotated[list[Name], Field(max_length=16)]


class ChangeBody(Body):
    """Names of safety officers to pin, and of pinned ones to take out."""

    add: Names = Field(default_factory=list)
    remove: Names = Field(default_factory=list)
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1000)]


@router.get("/api/trust")
def trust(request: Request, caller: SignedIn) -> dict[str, Any]:
    """Show the list in force, who waits to be pinned, open changes, and which version each node holds."""
    parts = parts_of(request)
    pass_gate(request, caller, Action.LOOK, Resource("trust", "persons", caller.tenant), own=True)
    with reading(parts.engine) as connection:
        held = trust_list.newest(connection)
        able = trust_change.signing(connection, held)
        return {
            "version": held.version, "threshold": trust_list.THRESHOLD,
            "persons": [{**_shown(p), "able": p in able} for p in trust_change.pins_of(connection, held)],
            "waiting": [_shown(p) for p in trust_change.waiting(connection, held)],
            "nodes": [{"node": n, "version": v} for n, v in sorted(parts.trust_seen.items())],
            "requests": _open(connection, held), "warning": trust_change.alarm(connection, held),
        }


def _shown(pin: trust_change.Pin) -> dict[str, str]:
    return {**pin.as_json(), "key_id": pin.key_id}


def _open(connection: Any, held: trust_list.TrustList) -> list[str]:
    found = rows.newest(connection)
    return [r.id for r in found if r.kind == approvals.TRUST and r.state == rows.OPEN and r.expires_us > now_us()
            and r.head == held.head]


@router.post("/api/trust/changes")
def change(request: Request, caller: SignedIn, body: ChangeBody) -> dict[str, Any]:
    """Ask for a change. Asking changes nothing: two pinned officers must sign exactly this list."""
    parts = parts_of(request)
    caller.require_person()
    pass_gate(request, caller, Action.CHANGE_TRUST, Resource("trust", "persons", caller.tenant))
    with reading(parts.engine) as connection:
        found = trust_change.propose(connection, body.add, body.remove, parts.trust_seen.values())
    with writing(parts.engine) as connection:
        made = approvals.ask(
            connection, kind=approvals.TRUST, body=found.body(), tenant=caller.tenant, asked_by=caller.person, owner="",
            needed=trust_list.THRESHOLD, reason=body.reason, head=found.head)
        parts.ledger.record(_asked(caller.person, caller.tenant, made), connection)
    return {"request": made.id, "digest": made.digest, "body": made.body, "needed": made.needed,
            "may_sign": _may_sign(parts, caller.person)}


def _asked(person: str, tenant: str, made: rows.Request) -> Event:
    return Event(EventType.APPROVAL_ASKED, person, tenant, facts={
        "request": made.id, "kind": made.kind, "digest": made.digest, "needed": made.needed, "reason": made.reason,
        "added": [p["person"] for p in made.body["added"]], "removed": [p["person"] for p in made.body["removed"]]})


def _may_sign(parts: Parts, asker: str) -> list[str]:
    with reading(parts.engine) as connection:
        able = trust_change.signing(connection, trust_list.newest(connection))
    return [p.name for p in able if p.person != asker]
