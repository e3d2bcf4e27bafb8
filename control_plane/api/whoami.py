"""Enrolment, sign-in, sign-out, step-up: what a person does with his own identity."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import StringConstraints

from control_plane.api.context import Body, SignedIn, bearer, declare, site_of, source_ip
from control_plane.auth import enrolment, login, stepup, throttle
from control_plane.auth.site import state
from control_plane.store import people
from control_plane.store.db import reading, writing
from interlock.call import Action
from interlock.errors import Denied, Malformed, Untrusted
from interlock.event import Event, EventType

router = APIRouter()

declare({
    ("POST", "/api/enrol"): Action.ENROL,
    ("POST", "/api/enrol/confirm"): Action.ENROL,
    ("POST", "/api/login"): Action.SIGN_IN,
    ("POST", "/api/logout"): Action.SIGN_IN,
    ("GET", "/api/whoami"): Action.SIGN_IN,
    ("POST", "/api/step-up"): Action.SIGN_IN,
})

Secret = Annotated[str, StringConstraints(min_length=20, max_length=128)]
Password = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Code = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class EnrolBody(Body):
    """`name` only for the bootstrap and recovery link; `person_key` base64 of the raw public key."""

    secret: Secret
    name: Annotated[str, StringConstraints(max_length=64)] = ""
    password: Password
    person_key: Annotated[str, StringConstraints(max_length=64)]


class ConfirmBody(Body):
    """The link's secret again, and the authenticator's first code."""

    secret: Secret
    code: Code


class LoginBody(Body):
    """Name and password, with or without the code; or the code alone under a half login's session."""

    name: Annotated[str, StringConstraints(max_length=64)] | None = None
    password: Password | None = None
    code: Code | None = None


class StepUpBody(Body):
    """`bound` is the digest of the very object that the action is about."""

    code: Code
    action: Annotated[str, StringConstraints(max_length=32)]
    bound: Digest


@router.post("/api/enrol")
def enrol(request: Request, body: EnrolBody) -> dict[str, Any]:
    """Begin an enrolment; may be repeated until it is confirmed."""
    begun = enrolment.begin(
        site_of(request), body.secret, body.name, body.password, body.person_key, source_ip(request)
    )
    return {"person": begun.person, "totp_secret": begun.totp_secret, "totp_uri": begun.totp_uri}


@router.post("/api/enrol/confirm")
def enrol_confirm(request: Request, body: ConfirmBody) -> dict[str, Any]:
    """Confirm an enrolment; the link is used up and the person is signed in."""
    session, person = enrolment.confirm(site_of(request), body.secret, body.code, source_ip(request))
    after = getattr(request.app.state, "enrolled", None)
    if after is not None:
        after(person.id)
    return {"session": session, "person": person.id, "name": person.name}


@router.post("/api/login")
def sign_in(request: Request, body: LoginBody) -> dict[str, Any]:
    """Sign in, or complete a half login (bearer: its session; body: the code alone)."""
    site, ip = site_of(request), source_ip(request)
    if body.name is not None and body.password is not None:
        done = login.sign_in(site, body.name, body.password, body.code, ip)
    elif body.name is None and body.password is None and body.code is not None:
        half = bearer(request)
        if not half:
            raise Untrusted("a code alone completes a half login", code="session", next_step="send name and password")
        done = login.complete(site, half, body.code, ip)
    else:
        raise Malformed("send name and password, or the code of a half login", code="request")
    return {"session": done.session, "person": done.person.id, "factor": done.factor}


@router.post("/api/logout")
def sign_out(request: Request, caller: SignedIn) -> dict[str, Any]:
    """End this session."""
    caller.require_person()
    site = site_of(request)
    with reading(site.engine) as connection:
        person = people.by_id(connection, caller.person)
    assert person is not None
    login.sign_out(site, caller.session, person)
    return {"signed_out": True}


@router.get("/api/whoami")
def whoami(request: Request, caller: SignedIn) -> dict[str, Any]:
    """Say who the credential stands for, with which roles, and how old its second factor is."""
    with reading(site_of(request).engine) as connection:
        here = state(connection)
    return {
        "id": caller.id, "person": caller.person, "name": caller.name, "tenant": caller.tenant, "kind": caller.kind,
        "roles": sorted(caller.roles), "mfa_age_ms": caller.mfa_age_ms(), "site": here,
        "scopes": None if caller.scopes is None else sorted(caller.scopes),
    }


@router.post("/api/step-up")
def step_up(request: Request, caller: SignedIn, body: StepUpBody) -> dict[str, Any]:
    """Prove a fresh second factor for one action on one object."""
    caller.require_person()
    if body.action not in {a.value for a in Action}:
        raise Malformed("unknown action", code="action")
    proof = proved(request, caller, body.code, Action(body.action), body.bound)
    return {"step_up": proof, "valid_s": stepup.LIFE_US // 10**6}


def proved(request: Request, caller: SignedIn, code: str, action: Action, bound: str) -> str:
    """Use a code up and return the id of the proof; charged before it is checked.

    Raises Untrusted (``untrusted.factor``), TooMany or Denied (an API key).
    """
    caller.require_person()
    site, limits = site_of(request), throttle.for_code(caller.person, caller.source_ip)
    throttle.charge(site.engine, limits)
    with writing(site.engine) as connection:
        person = people.by_id(connection, caller.person)
        if person is None or not person.enrolled:
            raise Denied("this account is disabled", code="disabled")
        proof = stepup.prove(connection, site.kek, caller.session, person, code, action, bound)
        throttle.succeeded(connection, limits)
        facts = {"action": action.value, "bound": bound, "source_ip": caller.source_ip}
        site.ledger.record(Event(EventType.STEPPED_UP, person.id, person.tenant, facts=facts), connection)
    return proof
