"""People: invitations, roles, disabling; and one's own API keys."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints

from control_plane.api.context import Body, Caller, SignedIn, declare, pass_gate, site_of
from control_plane.auth import apikeys, links, login
from control_plane.store import people
from control_plane.store import sessions as rows
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Resource
from interlock.errors import NotFound
from interlock.event import Event, EventType

router = APIRouter()

declare({
    ("POST", "/api/invitations"): Action.INVITE,
    ("GET", "/api/people"): Action.LOOK,
    ("POST", "/api/people/{name}/disable"): Action.INVITE,
    ("POST", "/api/people/{name}/roles"): Action.INVITE,
    ("POST", "/api/keys"): Action.MINT_KEY,
    ("GET", "/api/keys"): Action.LOOK,
    ("DELETE", "/api/keys/{key}"): Action.MINT_KEY,
})

Word = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class InvitationBody(Body):
    """Whom to invite, as what. The link is in the answer only, once."""

    name: Word
    roles: Annotated[list[Word], Field(min_length=1, max_length=8)]
    tenant: Word


class RolesBody(Body):
    """All roles that the person has from now on; an empty list takes every right away."""

    roles: Annotated[list[Word], Field(max_length=8)]


class KeyBody(Body):
    """`scopes` are names of actions; `days` at most 90."""

    name: Word
    scopes: Annotated[list[Word], Field(min_length=1, max_length=16)]
    days: Annotated[int, Field(ge=1, le=apikeys.MAX_DAYS)] = 30


@router.post("/api/invitations")
def invite(request: Request, caller: SignedIn, body: InvitationBody) -> dict[str, Any]:
    """Make a one-time link for a new person."""
    site = site_of(request)
    roles = links.checked_roles(body.roles)
    pass_gate(request, caller, Action.INVITE, Resource("person", links.checked_name(body.name), body.tenant))
    with writing(site.engine) as connection:
        secret, link = links.invite(
            connection, made_by=caller.person, name=body.name, tenant=body.tenant, roles=roles
        )
        facts = {"name": link.name, "roles": list(roles), "tenant": link.tenant, "expires_us": link.expires_us}
        site.ledger.record(Event(EventType.INVITED, caller.person, caller.tenant, facts=facts), connection)
    return {"link": f"{_address(request)}/enrol#{secret}", "expires_us": link.expires_us}


def _address(request: Request) -> str:
    """Return the site's own address from its settings; the Host header decides nothing."""
    return str(request.app.state.settings.people_url).rstrip("/")


@router.get("/api/people")
def listing(request: Request, caller: SignedIn) -> dict[str, Any]:
    """List persons with their roles; for whoever may look at persons."""
    pass_gate(request, caller, Action.LOOK, Resource("person", "all", caller.tenant))
    with reading(site_of(request).engine) as connection:
        return {"people": [{
            "name": p.name, "person": p.id, "tenant": p.tenant, "enrolled": p.totp_active, "disabled": p.disabled,
            "roles": sorted(people.roles_of(connection, p.id, p.tenant))} for p in people.everybody(connection)]}


def _administered(request: Request, caller: Caller, name: str) -> str:
    """Return the id of that person after asking the gate; raises NotFound or what the gate raises."""
    caller.require_person()
    with reading(site_of(request).engine) as connection:
        found = people.by_name(connection, name)
    tenant = caller.tenant if found is None else found.tenant
    pass_gate(request, caller, Action.INVITE, Resource("person", name[:64] or "-", tenant))
    if found is None:
        raise NotFound("no such person", code="person")
    return found.id


@router.post("/api/people/{name}/disable")
def disable(request: Request, caller: SignedIn, name: str) -> dict[str, Any]:
    """Put a person out at once: sessions, keys, links that he made; his runs get no further lease."""
    login.disable(site_of(request), _administered(request, caller, name), caller.person)
    _ring(request)
    return {"name": name, "disabled": True}


@router.post("/api/people/{name}/roles")
def change_roles(request: Request, caller: SignedIn, name: str, body: RolesBody) -> dict[str, Any]:
    """Replace a person's roles; he signs in again."""
    login.change_roles(site_of(request), _administered(request, caller, name), frozenset(body.roles), caller.person)
    _ring(request)
    return {"name": name, "roles": sorted(set(body.roles))}


def _ring(request: Request) -> None:
    """Let every waiting poll look again, and so at whether its reader may still read."""
    parts = getattr(request.app.state, "parts", None)
    if parts is not None:
        parts.bell.ring()


@router.post("/api/keys")
def mint(request: Request, caller: SignedIn, body: KeyBody) -> dict[str, Any]:
    """Make an API key of one's own; it is shown here and never again."""
    caller.require_person()
    site = site_of(request)
    pass_gate(request, caller, Action.MINT_KEY, Resource("key", "new", caller.tenant), own=True)
    with writing(site.engine) as connection:
        key, row = apikeys.mint(connection, caller.person, body.name, body.scopes, body.days)
        facts = {"key": row.id, "name": row.name, "scopes": list(row.scopes), "expires_us": row.expires_us}
        site.ledger.record(Event(EventType.KEY_MINTED, caller.person, caller.tenant, facts=facts), connection)
    return {"key": key, **_shown(row)}


def _shown(row: rows.ApiKey) -> dict[str, Any]:
    return {
        "id": row.id, "name": row.name, "scopes": list(row.scopes), "created_us": row.created_us,
        "expires_us": row.expires_us, "used_us": row.used_us, "revoked_us": row.revoked_us,
    }


@router.get("/api/keys")
def keys(request: Request, caller: SignedIn) -> dict[str, Any]:
    """List one's own keys, without their secrets."""
    pass_gate(request, caller, Action.LOOK, Resource("key", "own", caller.tenant), own=True)
    with reading(site_of(request).engine) as connection:
        return {"keys": [_shown(row) for row in rows.keys_of(connection, caller.person)]}


@router.delete("/api/keys/{key}")
def revoke(request: Request, caller: SignedIn, key: str) -> dict[str, Any]:
    """End one of one's own keys at once; no gate is asked, since taking a right away is always allowed."""
    caller.require_person()
    _revoke(request, caller, key)
    return {"id": key, "revoked": True}


def _revoke(request: Request, caller: Caller, key: str) -> None:
    site = site_of(request)
    with writing(site.engine) as connection:
        if not rows.revoke_key(connection, key, caller.person, now_us()):
            raise NotFound("no such key of yours", code="key")
        event = Event(EventType.KEY_REVOKED, caller.person, caller.tenant, facts={"key": key})
        site.ledger.record(event, connection)
