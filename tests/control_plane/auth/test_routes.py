"""Walks over every route of the people's app: an action each; nobody and half a login get nothing; forged
requests, unknown fields, wrong methods."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from control_plane.api import context
from control_plane.app import ROUTERS
from interlock.call import Action
from tests.control_plane.auth.conftest import PASSWORD, House

# What a person without a session may reach: the doors themselves.
DOORS = {("POST", "/api/enrol"), ("POST", "/api/enrol/confirm"), ("POST", "/api/login"), ("GET", "/healthz")}


def _routes() -> Iterator[tuple[str, str]]:
    for module in ROUTERS:
        for route in module.router.routes:
            assert isinstance(route, APIRoute), route
            for method in sorted(route.methods):
                yield method, route.path


ROUTES = sorted(set(_routes()))
GUARDED = [r for r in ROUTES if r not in DOORS]


@pytest.fixture
def whole(house: House) -> House:
    """The house with every router of the people's app, not only the identity part."""
    app: FastAPI = house.app
    for module in ROUTERS:
        app.include_router(module.router)
    return house


def _ask(house: House, method: str, path: str, credential: str = "", **more: Any) -> httpx.Response:
    concrete = path.replace("{", "").replace("}", "")
    return house.send(method, concrete, credential, **more)


def test_every_route_declares_its_action() -> None:
    table = context.declared()
    assert [r for r in ROUTES if r not in table] == []
    assert [r for r in ROUTES if table[r] is None and r not in DOORS] == []
    assert len(GUARDED) > 20
    assert all(action is None or isinstance(action, Action) for action in table.values())


def test_I7_nobody_and_half_a_login_get_nothing(whole: House) -> None:
    """Also an unknown session, an ended one, and things that only look like credentials."""
    half = whole.post("/api/login", {"name": "ada", "password": PASSWORD}).json()["session"]
    ended = whole.post("/api/login", {"name": "ada", "password": PASSWORD,
                                      "code": whole.code(whole.humans["ada"])}).json()["session"]
    assert whole.post("/api/logout", session=ended).status_code == 200
    for method, path in GUARDED:
        for credential in ("", half, ended, "ils_" + "A" * 43, "interlock_sk_0_0_0", "x"):
            answer = _ask(whole, method, path, credential, json={})
            assert answer.status_code == 401, (method, path, credential, answer.text)
            assert answer.json()["error"]["code"].startswith("untrusted.")
            assert answer.headers["www-authenticate"] == "Bearer"


def test_a_full_session_passes_that_point(house: House) -> None:
    """Positive control of the walk above."""
    session = house.humans["ada"].session
    for method, path in [r for r in GUARDED if r in {("GET", "/api/whoami"), ("GET", "/api/keys")}]:
        assert _ask(house, method, path, session).status_code in (200, 403)
    assert house.get("/api/whoami", session).status_code == 200


def test_refuses_when_a_field_is_unknown(house: House) -> None:
    session = house.humans["ada"].session
    body = {"name": "rob", "roles": ["researcher"], "tenant": "lab"}
    refused = house.post("/api/invitations", {**body, "administrator": True}, session)
    assert refused.status_code == 422
    assert refused.json()["error"]["details"]["fields"] == ["body.administrator: extra_forbidden"]
    assert house.post("/api/invitations", body, session).status_code == 200


def test_refuses_without_repeating_what_was_sent(house: House) -> None:
    for body in ({"name": "ada", "password": [PASSWORD]}, {"name": "ada", "password": PASSWORD, "pin": PASSWORD}):
        refused = house.post("/api/login", body)
        assert refused.status_code == 422
        assert PASSWORD not in refused.text
    refused = house.send("POST", "/api/login", content=b"{" + PASSWORD.encode(),
                         headers={"content-type": "application/json"})
    assert refused.status_code == 422
    assert PASSWORD not in refused.text


def test_unknown_paths_and_methods_are_typed(house: House) -> None:
    assert house.get("/api/nothing").json()["error"]["code"] == "not_found"
    assert house.get("/api/login").json()["error"]["code"] == "usage.method"


# --- cookie sessions -----------------------------------------------------------------------------------------


def _with_cookie(house: House, path: str, headers: dict[str, str], body: object = None) -> httpx.Response:
    cookie = {"cookie": f"{context.COOKIE}={house.humans['ada'].session}"}
    data = b"" if body is None else json.dumps(body).encode()
    kind = {} if body is None else {"content-type": "application/json"}
    return house.send("POST", path, content=data, headers={**cookie, **kind, **headers})


BODY = {"name": "rob", "roles": ["researcher"], "tenant": "lab"}


@pytest.mark.parametrize("case", ["none", "no token", "wrong token", "cross site", "same site", "other origin",
                                  "origin lies", "null origin"])
@pytest.mark.parametrize("path", ["/api/invitations", "/api/logout"])
def test_refuses_a_forged_request_under_a_cookie(house: House, case: str, path: str) -> None:
    """/api/logout has no body: a form of a strange page would pass every content-type check there."""
    own, token = house.url, context.csrf_token(house.humans["ada"].session)
    good = {"sec-fetch-site": "same-origin", "origin": own, "x-csrf-token": token}
    headers = {
        "none": {},
        "no token": {k: v for k, v in good.items() if k != "x-csrf-token"},
        "wrong token": {**good, "x-csrf-token": context.csrf_token("ils_other")},
        "cross site": {**good, "sec-fetch-site": "cross-site"},
        "same site": {**good, "sec-fetch-site": "same-site"},
        "other origin": {"origin": "http://localhost:1", "x-csrf-token": token},
        "origin lies": {**good, "origin": "http://evil.example"},
        "null origin": {"origin": "null", "x-csrf-token": token},
    }[case]
    body = BODY if path == "/api/invitations" else None
    refused = _with_cookie(house, path, headers, body)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "untrusted.csrf"
    assert house.get("/api/whoami", house.humans["ada"].session).status_code == 200
    assert _with_cookie(house, path, good, body).status_code == 200


def test_a_cookie_reads_without_a_token_and_an_old_browser_needs_its_origin(house: House) -> None:
    session = house.humans["ada"].session
    cookie = {"cookie": f"{context.COOKIE}={session}"}
    assert house.get("/api/whoami", headers=cookie).status_code == 200
    headers = {"origin": house.url, "x-csrf-token": context.csrf_token(session)}
    assert _with_cookie(house, "/api/invitations", headers, BODY).status_code == 200


def test_a_bearer_credential_wins_over_a_cookie(house: House) -> None:
    cookie = {"cookie": f"{context.COOKIE}={house.humans['ada'].session}"}
    assert house.get("/api/whoami", "ils_wrong", headers=cookie).status_code == 401
