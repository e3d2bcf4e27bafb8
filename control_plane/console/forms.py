"""What the console's forms do; each works without JavaScript and answers with a redirect or a page."""

import io
from typing import Any

import segno
from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse

from control_plane.api import approvals as approvals_api
from control_plane.api import kill, ledger
from control_plane.api.context import COOKIE, declare, site_of, source_ip
from control_plane.auth import enrolment, login
from control_plane.console import scene
from control_plane.console.view import PageRoute, end_session, reader, render, start_session
from control_plane.lane import aside
from control_plane.parts import parts_of
from control_plane.store import people
from control_plane.store.db import reading
from interlock.call import Action
from interlock.errors import Refusal, Untrusted

router = APIRouter(route_class=PageRoute, include_in_schema=False)

declare({
    ("GET", "/login"): None, ("POST", "/login"): Action.SIGN_IN, ("GET", "/login/factor"): None,
    ("POST", "/login/factor"): Action.SIGN_IN, ("POST", "/logout"): Action.SIGN_IN, ("GET", "/enrol"): None,
    ("POST", "/enrol"): Action.ENROL, ("POST", "/enrol/confirm"): Action.ENROL, ("POST", "/stop"): Action.STOP,
    ("POST", "/approvals/{approval}"): Action.APPROVE, ("POST", "/audit/export"): Action.EXPORT_EVIDENCE,
})


async def _form(request: Request) -> dict[str, str]:
    form = await request.form(max_files=0, max_fields=20)
    return {name: str(value) for name, value in form.items()}


def _own_page(request: Request) -> None:
    """Refuse a form of somebody else's page where no session is there yet to bind a token to."""
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise Untrusted("this form does not come from our own pages", code="csrf", next_step="open the page yourself")


@router.get("/login")
def login_page(request: Request) -> Response:
    """Show the sign-in form."""
    return render(request, "login.html")


@router.post("/login")
async def sign_in(request: Request) -> Response:
    """Take name and password; the second factor follows."""
    form = await _form(request)
    _own_page(request)

    def work() -> Response:
        try:
            done = login.sign_in(site_of(request), form.get("name", ""), form.get("password", ""), None,
                                 source_ip(request), client="console")
        except Refusal as refusal:
            return render(request, "login.html", status=refusal.http_status, problem=refusal)
        return start_session("/login/factor", done.session)

    return await run_in_threadpool(work)


@router.get("/login/factor")
def factor_page(request: Request) -> Response:
    """Show the form of the second factor."""
    return render(request, "factor.html")


@router.post("/login/factor")
async def factor(request: Request) -> Response:
    """Complete a half login; the session gets a new id."""
    form = await _form(request)
    _own_page(request)

    def work() -> Response:
        try:
            done = login.complete(site_of(request), request.cookies.get(COOKIE, ""), form.get("code", ""),
                                  source_ip(request), client="console")
        except Refusal as refusal:
            if refusal.code.startswith("untrusted.session"):
                return RedirectResponse("/login", 303)
            return render(request, "factor.html", status=refusal.http_status, problem=refusal)
        return start_session("/", done.session)

    return await run_in_threadpool(work)


@router.post("/logout")
async def sign_out(request: Request) -> Response:
    """End this session."""
    form = await _form(request)

    def work() -> Response:
        caller, site = reader(request, form), site_of(request)
        with reading(site.engine) as connection:
            person = people.by_id(connection, caller.person)
        if person is not None:
            login.sign_out(site, caller.session, person)
        return end_session()

    return await run_in_threadpool(work)


@router.get("/enrol")
def enrol_page(request: Request) -> Response:
    """Show the enrolment form; the secret is in the link's fragment, which no server sees."""
    return render(request, "enrol.html")


@router.post("/enrol")
async def enrol(request: Request) -> Response:
    """Begin an enrolment and show the authenticator's secret, once."""
    form = await _form(request)
    _own_page(request)

    def work() -> Response:
        try:
            begun = enrolment.begin(site_of(request), form.get("secret", ""), form.get("name", ""),
                                    form.get("password", ""), "", source_ip(request))
        except Refusal as refusal:
            return render(request, "enrol.html", status=refusal.http_status, problem=refusal)
        return _confirm_page(request, form.get("secret", ""), begun.totp_secret, begun.totp_uri)

    return await run_in_threadpool(work)


def _confirm_page(request: Request, secret: str, totp_secret: str, uri: str) -> Response:
    out = io.BytesIO()
    segno.make(uri, error="m").save(out, kind="png", scale=6, border=4, light="white")
    return render(request, "enrol_confirm.html", secret=secret, totp_secret=totp_secret,
                  qr=scene.picture(out.getvalue()))


@router.post("/enrol/confirm")
async def enrol_confirm(request: Request) -> Response:
    """Confirm with one code and sign in."""
    form = await _form(request)
    _own_page(request)

    def work() -> Response:
        session, person = enrolment.confirm(site_of(request), form.get("secret", ""), form.get("code", ""),
                                            source_ip(request), client="console")
        after = getattr(request.app.state, "enrolled", None)
        if after is not None:
            after(person.id)
        return start_session("/", session)

    return await run_in_threadpool(work)


@router.post("/stop")
async def stop(request: Request) -> Response:
    """Stop: one person, no second factor, nothing but the stop rule is asked."""
    form = await _form(request)

    def work() -> Response:
        caller = reader(request, form, note=False)
        done = kill.accept(parts_of(request), caller, form.get("scope", ""), form.get("reason", ""))
        return RedirectResponse(f"/kill/{done['order']}", 303)

    return await aside(work)


@router.post("/approvals/{approval}")
async def answer(request: Request, approval: str) -> Response:
    """Approve or refuse with a fresh code."""
    form = await _form(request)

    def work() -> Response:
        caller = reader(request, form)
        body: Any = approvals_api.VoteBody(code=form.get("code", "") or "-", reason=form.get("reason", "")[:1000])
        approvals_api.cast(request, caller, approval, body, approve=form.get("answer") == "approve")
        return RedirectResponse(f"/approvals/{approval}", 303)

    return await run_in_threadpool(work)


@router.post("/audit/export")
async def export(request: Request) -> Response:
    """Make an export; the browser saves it."""
    form = await _form(request)

    def work() -> Response:
        return ledger.make_export(request, reader(request, form))

    return await run_in_threadpool(work)
