"""Invitations and API keys."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints

from control_plane.api.context import Body, Caller, SignedIn, declare, pass_gate, site_of
from control_plane.auth import apikeys, links
from control_plane.store import sessions as rows
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Resource
from interlock.errors import NotFound
from interlock.event import Event, EventType

router = APIRouter()

declare({
    ("POST", "/api/invitations"): Action.INVITE,
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
