"""How a page is rendered: language, caller, template, and refusals as pages instead of JSON.

A full page passes the gate like any API call. Its live parts are refreshed every second or two under the look
that the page was given: the session and its person are checked on every refresh, the gate again once a minute,
so that looking does not flood the ledger.
"""

import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse

from control_plane.api.context import (
    COOKIE,
    Caller,
    caller_of,
    check_csrf,
    csrf_token,
    pass_gate,
)
from control_plane.auth.sessions import no_session
from control_plane.auth.site import state
from control_plane.console.language import LANGUAGES, choose, translate
from control_plane.parts import parts_of
from control_plane.store import approvals
from control_plane.store.db import now_us, reading
from interlock.call import Action, Resource
from interlock.errors import Refusal

HERE = Path(__file__).parent
LOOK_S = 60.0
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)
# Directional overrides and zero-width characters make one name look like another.
_INVISIBLE = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200B, 0x200C, 0x200D, 0xFEFF])


def utc(us: int) -> str:
    """Return a time in microseconds as ``2026-11-30 18:08:27`` in UTC, a dash for 0."""
    return datetime.fromtimestamp(us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S") if us else "–"


def plain(text: object) -> str:
    """Return text without invisible and directional characters."""
    return str(text).translate(_INVISIBLE)


def _ago(language: str, us: int) -> str:
    if not us:
        return translate(language, "never")
    seconds = max(0, (now_us() - us) // 1_000_000)
    for limit, unit, word in ((5, 0, "just now"), (120, 1, "s ago"), (7200, 60, "min ago"), (1 << 62, 3600, "h ago")):
        if seconds < limit:
            return f"{seconds // unit} {translate(language, word)}" if unit else translate(language, word)
    return ""


def language_of(request: Request) -> str:
    """Return the short name of the reader's language."""
    accept = request.headers.get("accept-language", "")
    return choose(request.query_params.get("lang"), request.cookies.get("lang"), accept)


def reader(request: Request, form: dict[str, str] | None = None, *, note: bool = True) -> Caller:
    """Return who reads, by cookie; for a form (`form`) its token is checked; `note` as in `caller_of`.

    Raises Untrusted (401).
    """
    cookie = request.cookies.get(COOKIE, "")
    if not cookie:
        raise no_session()
    if form is not None:
        check_csrf(request, cookie, form.get("csrf", ""))
    return caller_of(request, cookie, note=note)


def render(
    request: Request, template: str, caller: Caller | None = None, *, here: str = "", status: int = 200,
    problem: Refusal | None = None, **values: Any,
) -> Response:
    """Return a page or a live part in the reader's language."""
    language, parts = language_of(request), parts_of(request)
    with reading(parts.engine) as connection:
        waiting, site = approvals.count_open(connection, now_us()) if caller else 0, state(connection)
    cookie = request.cookies.get(COOKIE, "")
    shown = {
        "_": lambda message: translate(language, message), "lang": LANGUAGES[language], "caller": caller, "here": here,
        "csrf": csrf_token(cookie) if caller else "", "waiting": waiting, "site_state": site,
        "site_name": parts.settings.site, "problem": problem, "utc": utc, "ago": lambda us: _ago(language, us),
        "now_us": now_us(), **values,
    }
    answer = HTMLResponse(_ENVIRONMENT.get_template(template).render(shown), status)
    if request.query_params.get("lang") in LANGUAGES:
        answer.set_cookie("lang", language, max_age=31_536_000, httponly=True, samesite="strict", path="/")
    return answer


def start_session(target: str, session: str) -> Response:
    """Return a redirect that carries a new session's cookie."""
    answer = RedirectResponse(target, 303)
    answer.set_cookie(COOKIE, session, secure=True, httponly=True, samesite="strict", path="/")
    return answer


def end_session() -> Response:
    """Return a redirect to the sign-in page that drops the cookie."""
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, secure=True, httponly=True, samesite="strict", path="/")
    return answer


def glance(request: Request, what: str) -> Caller:
    """Return the reader of a live part of the page `what`; the gate is asked at most once a minute a session."""
    caller = reader(request)
    seen: dict[tuple[str, str], float] = request.app.state.__dict__.setdefault("glances", {})
    now, key = time.monotonic(), (caller.session, what)
    if now - seen.get(key, -LOOK_S) >= LOOK_S:
        pass_gate(request, caller, Action.LOOK, Resource("console", what, caller.tenant), own=True)
        for old in [k for k, at in seen.items() if now - at >= LOOK_S]:
            seen.pop(old, None)
        seen[key] = now
    return caller


class PageRoute(APIRoute):
    """Turns a typed refusal into a page; without a session the reader is sent to sign in."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of this route."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await inner(request)
            except Refusal as refusal:
                return _refused(request, refusal)

        return handle


def _refused(request: Request, refusal: Refusal) -> Response:
    part = request.url.path.startswith("/fragments/")
    if refusal.code.startswith("untrusted.session") and request.method == "GET" and not part:
        return RedirectResponse("/login", 303)
    try:
        caller = reader(request)
    except Refusal:
        caller = None
    return render(request, "error.html", caller, status=refusal.http_status, problem=refusal)
