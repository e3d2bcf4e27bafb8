"""From a request to a caller, from a caller through the gate to a permit; refusals to JSON.

Rules: the caller comes from a session or an API key in our store, never from a body or a proxy header; roles
are read again at every request (I10); a half login is nobody here (I7); a cookie session needs same origin and
a token on every unsafe method, body or not; an API key acts within its scopes and never with a second factor.
Every route stands in the table `declared()` with its action; a test walks the app's routes against it.
"""

import base64
import contextlib
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection
from starlette.exceptions import HTTPException

from control_plane.auth import apikeys, sessions, stepup
from control_plane.auth.site import Site, state
from control_plane.store import people, programmes
from control_plane.store import sessions as rows
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Call, Resource, Subject
from interlock.errors import Denied, Malformed, Refusal, StepUpRequired, TooMany, Unavailable, Untrusted
from interlock.permit import Permit
from policy.decide import Facts

COOKIE = "__Host-interlock"
CSRF_HEADER, CSRF_FIELD = "x-csrf-token", "csrf"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_DECLARED: dict[tuple[str, str], Action | None] = {}


class Body(BaseModel):
    """A request body; a field that we do not know is refused, so that an attempt at escalation is seen."""

    model_config = ConfigDict(extra="forbid", strict=True)


def declare(table: Mapping[tuple[str, str], Action | None]) -> None:
    """Name the action of each (method, path); None is a route that needs nobody (healthz)."""
    _DECLARED.update(table)


def declared() -> Mapping[tuple[str, str], Action | None]:
    """Return the action of every declared route."""
    return dict(_DECLARED)


@dataclass(frozen=True)
class Caller:
    """Who calls. `person` is the human, `id` the person or the API key; `session` the hash, empty for a key.

    `kind` is ``person`` or ``service``; `factor_us` when the second factor was given in this session (0: never);
    `scopes` limits a key, None for a person; `source_ip` is the transport's peer.
    """

    id: str
    person: str
    name: str
    tenant: str
    roles: frozenset[str]
    kind: str
    session: str
    factor_us: int
    scopes: frozenset[str] | None
    source_ip: str

    def mfa_age_ms(self, now: int | None = None) -> int | None:
        """Return milliseconds since the second factor of this session, None when there was none."""
        age = (now_us() if now is None else now) - self.factor_us
        return age // 1000 if self.factor_us and age >= 0 else None

    def subject(self) -> Subject:
        """Return the subject of this caller's calls."""
        return Subject(self.id, self.tenant, self.kind, self.person)

    def require_scope(self, action: Action) -> None:
        """Refuse what an API key was not minted for; a person passes. Raises Denied (``denied.scope``)."""
        if self.scopes is not None and action.value not in self.scopes:
            raise Denied(f"this API key has no scope {action.value}", code="scope",
                         next_step="mint a key with that scope, or sign in as a person")

    def require_person(self) -> None:
        """Refuse an API key. Raises Denied (``denied.person``)."""
        if self.kind != "person":
            raise Denied("a program does not do this", code="person", next_step="sign in as a person")


def site_of(request: Request) -> Site:
    """Return what the app's composition root put on `app.state`."""
    kept = request.app.state
    return Site(kept.engine, kept.kek, kept.gate, kept.ledger)


def source_ip(request: Request) -> str:
    """Return the transport's peer; no header is read (I8)."""
    return request.client.host if request.client else ""


def bearer(request: Request) -> str:
    """Return the credential of the Authorization header, empty when there is none."""
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else ""


def csrf_token(credential: str) -> str:
    """Return the token that belongs to a session credential; it cannot be had without the credential."""
    digest = hmac.new(credential.encode(), b"interlock/csrf/v1", hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def check_csrf(request: Request, credential: str, given: str | None = None) -> None:
    """Refuse an unsafe request under a cookie unless it comes from our own pages.

    Args: `given` the form field of a page without JavaScript, else the header is read. Both origin and token
    must hold. Raises Untrusted (``untrusted.csrf``).
    """
    if request.method in _SAFE:
        return
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    host = request.headers.get("host", "")
    same = site == "same-origin" if site is not None else origin is not None and urlsplit(origin).netloc == host
    if origin is not None and urlsplit(origin).netloc != host:
        same = False
    token = request.headers.get(CSRF_HEADER, "") if given is None else given
    if not same or not hmac.compare_digest(token.encode(), csrf_token(credential).encode()):
        raise Untrusted("this request does not come from our own pages", code="csrf",
                        next_step="reload the page and try again")


def credential_of(request: Request) -> str:
    """Return the bearer credential, or the cookie's after the check against forged requests."""
    found = bearer(request)
    if found:
        return found
    cookie = request.cookies.get(COOKIE, "")
    if not cookie:
        raise sessions.no_session()
    check_csrf(request, cookie)
    return cookie


def signed_in(request: Request) -> Caller:
    """Return who calls: a full session or an API key. Raises Untrusted (401), also for a half login."""
    return caller_of(request, credential_of(request))


def caller_of(request: Request, credential: str, *, note: bool = True) -> Caller:
    """Return the caller behind a credential. Raises Untrusted (401).

    Args: `note` whether its use is written down; a stop writes nothing and so waits for no lock.
    """
    site = site_of(request)
    if credential.startswith(apikeys.PREFIX):
        return _by_key(site, credential, source_ip(request), note=note)
    with reading(site.engine) as connection:
        session, person = sessions.current(connection, credential)
        roles = people.roles_of(connection, person.id, person.tenant)
    if not session.factor:
        raise sessions.no_session()
    if note:
        sessions.touch(site.engine, session)
    return Caller(
        person.id, person.id, person.name, person.tenant, roles, "person", session.hash, session.created_us, None,
        source_ip(request),
    )


def _by_key(site: Site, credential: str, ip: str, *, note: bool) -> Caller:
    with reading(site.engine) as connection:
        key, person = apikeys.current(connection, credential)
        roles = people.roles_of(connection, person.id, person.tenant)
    now = now_us()
    if note and now - key.used_us > 60_000_000:
        with contextlib.suppress(Unavailable), writing(site.engine) as connection:
            rows.touch_key(connection, key.id, now)
    return Caller(
        key.id, person.id, f"{person.name}/{key.name}", person.tenant, roles, "service", "", 0, frozenset(key.scopes),
        ip,
    )


SignedIn = Annotated[Caller, Depends(signed_in)]


def facts_of(
    request: Request, caller: Caller, *, approvals: int = 0, own: bool = False, proof: rows.Proof | None = None
) -> Facts:
    """Return the facts of a decision, all from our store. `proof` from `shown_proof`."""
    with reading(site_of(request).engine) as connection:
        roles, here = people.roles_of(connection, caller.person, caller.tenant), state(connection)
        member = programmes.of_person(connection, caller.person, now_us())
    age = caller.mfa_age_ms() if proof is None else (now_us() - proof.at_us) // 1000
    return Facts(roles=roles, mfa_age_ms=age, mfa_bound="" if proof is None else proof.bound, approvals=approvals,
                 programmes=member, bundle_age_ms=0, state=here, own=own)  # its own bundle and stop state, read now


def shown_proof(request: Request, caller: Caller, step_up: str | None, action: Action, bound: str) -> rows.Proof | None:
    """Return the proof of the second factor that the body named, None when it named none.

    Raises StepUpRequired when it is for another session, action or digest, used, or too old.
    """
    if not step_up:
        return None
    if not caller.session:
        raise StepUpRequired("an API key has no second factor", next_step="sign in as a person")
    with reading(site_of(request).engine) as connection:
        return stepup.shown(connection, step_up, caller.session, action, bound)


def pass_gate(
    request: Request, caller: Caller, action: Action, resource: Resource, *, bound: str = "", run: str = "",
    step_up: str | None = None, approvals: int = 0, own: bool = False, spend: bool = True,
) -> Permit:
    """Ask the gate for this caller and return its permit; a proof of the second factor is used up by it.

    Args: `bound` digest of what the call is about; `step_up` id of a proof; `approvals` persons whose votes
    count now (auth.approvals.standing); `own` whether the resource is the caller's; `spend` False leaves the
    proof to `spend_proof` in the transaction of the effect, so that a question asked again finds it unused.
    Raises Denied (scope, policy), StepUpRequired, ApprovalRequired, Halted, Stale or NotRecorded.
    """
    caller.require_scope(action)
    proof = shown_proof(request, caller, step_up, action, bound)
    facts = facts_of(request, caller, approvals=approvals, own=own, proof=proof)
    call = Call(action, caller.subject(), resource, run, bound, caller.source_ip)
    site = site_of(request)
    permit = site.gate.ask(call, facts)
    if proof is not None and spend:
        with writing(site.engine) as connection:
            spend_proof(connection, proof)
    return permit


def spend_proof(connection: Connection, proof: rows.Proof | None) -> None:
    """Use a proof up, None changes nothing. Raises StepUpRequired when another call was faster."""
    if proof is not None:
        stepup.use(connection, proof)


def error_answer(refusal: Refusal) -> JSONResponse:
    """Return the JSON answer of a refusal: ``{"error": {code, message, next_step, details}}``."""
    headers = {"cache-control": "no-store"}
    if isinstance(refusal, TooMany):
        headers["retry-after"] = str(refusal.details.get("retry_after_s", 60))
    if refusal.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": refusal.as_json()}, refusal.http_status, headers)


def _invalid(error: RequestValidationError) -> Malformed:
    """Say where and why, never what was sent: it may be a password."""
    where = [".".join(str(p) for p in e.get("loc", ())) + ": " + str(e.get("type", "")) for e in error.errors()[:8]]
    return Malformed("the request does not have the form of this route", code="request",
                     next_step="see docs/decisions/0001-seams.md §5", details={"fields": where})


async def _on_refusal(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return error_answer(error)


async def _on_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_answer(_invalid(error))


async def _on_http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    known = {404: "not_found", 405: "usage.method", 413: "malformed.size", 415: "malformed.content_type"}
    code = known.get(error.status_code, "refused")
    body = {"code": code, "message": str(error.detail), "next_step": "", "details": {}}
    return JSONResponse({"error": body}, error.status_code, {"cache-control": "no-store"})


def install(app: FastAPI) -> None:
    """Make the app answer refusals, wrong requests and unknown paths as typed JSON errors."""
    app.add_exception_handler(Refusal, _on_refusal)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
