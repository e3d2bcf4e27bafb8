"""API keys: form, checksum, scopes, end, revocation; never a second factor."""

import re

import pytest
from sqlalchemy import text

from control_plane.api import context
from control_plane.auth import apikeys, login
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action
from interlock.errors import Denied, Malformed
from tests.control_plane.auth.conftest import House


def _mint(house: House, name: str = "rob", **more: object) -> dict[str, object]:
    answer = house.post("/api/keys", {"name": "nightly", "scopes": ["look", "launch"], **more},
                        house.humans[name].session)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_key_acts_for_its_owner_within_its_scopes(lab: House) -> None:
    made = _mint(lab)
    key = str(made["key"])
    assert re.fullmatch(r"interlock_sk_[0-9A-Za-z]{10}_[0-9A-Za-z]{30}_[0-9A-Za-z]{6}", key)
    me = lab.get("/api/whoami", key).json()
    assert (me["kind"], me["person"], me["roles"], me["scopes"], me["mfa_age_ms"]) == (
        "service", lab.humans["rob"].id, ["researcher"], ["launch", "look"], None)
    assert lab.get("/api/keys", key).json()["keys"][0]["id"] == made["id"]
    refused = lab.post("/api/invitations", {"name": "x1", "roles": ["auditor"], "tenant": "lab"}, key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "denied.scope")
    assert [e["facts"]["key"] for e in lab.events("identity.api_key_minted")] == [made["id"]]


def test_a_key_is_shown_once_and_kept_as_a_hash(lab: House) -> None:
    key = str(_mint(lab)["key"])
    with reading(lab.engine) as connection:
        rows = repr(connection.execute(text("SELECT * FROM api_keys")).all())
        rows += repr(connection.execute(text("SELECT body FROM ledger_outbox")).all())
    assert key.split("_")[3] not in rows
    assert key not in lab.get("/api/keys", lab.humans["rob"].session).text


@pytest.mark.parametrize("change", ["checksum", "secret", "id", "cut", "blank"])
def test_refuses_when_a_key_is_not_exactly_right(lab: House, change: str) -> None:
    key = str(_mint(lab)["key"])
    head, ident, secret = "interlock_sk", key.split("_")[2], key.split("_")[3]
    other = secret[:-1] + ("a" if secret[-1] != "a" else "b")
    body = {"secret": f"{head}_{ident}_{other}", "id": f"{head}_0123456789_{secret}"}.get(change)
    wrong = {"checksum": key[:-1] + ("a" if key[-1] != "a" else "b"), "cut": key[:-1], "blank": key + "_x"}.get(
        change, f"{body}_{apikeys.checksum(body)}" if body else "")
    refused = lab.get("/api/whoami", wrong)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "untrusted.api_key")
    assert lab.get("/api/whoami", key).status_code == 200


def test_refuses_when_the_checksum_is_wrong_before_the_database_is_asked() -> None:
    with pytest.raises(Exception, match="API key"):
        apikeys.current(None, "interlock_sk_" + "a" * 10 + "_" + "b" * 30 + "_000000")  # type: ignore[arg-type]


def test_refuses_when_a_key_is_revoked_expired_or_its_owner_disabled(lab: House) -> None:
    key, rob = _mint(lab), lab.humans["rob"]
    assert lab.send("DELETE", f"/api/keys/{key['id']}", lab.humans["sue"].session).status_code == 404
    assert lab.get("/api/whoami", str(key["key"])).status_code == 200
    assert lab.send("DELETE", f"/api/keys/{key['id']}", rob.session).status_code == 200
    assert lab.get("/api/whoami", str(key["key"])).status_code == 401
    old = str(_mint(lab)["key"])
    with writing(lab.engine) as connection:
        connection.execute(text("UPDATE api_keys SET expires_us = :t"), {"t": now_us() - 1})
    assert lab.get("/api/whoami", old).status_code == 401
    last = str(_mint(lab)["key"])
    login.disable(lab.site, rob.id, by="test")
    assert lab.get("/api/whoami", last).status_code == 401


@pytest.mark.parametrize("scope", sorted(a.value for a in Action if a not in apikeys.SCOPES))
def test_refuses_scopes_that_need_a_person(scope: str) -> None:
    with pytest.raises(Denied) as caught:
        apikeys.scopes_of(["look", scope])
    assert caught.value.code == "denied.scope"
    assert apikeys.scopes_of(["look"]) == ("look",)


@pytest.mark.parametrize("scopes", [[], ["everything"], ["look", "x"]])
def test_refuses_when_a_scope_is_unknown(scopes: list[str]) -> None:
    with pytest.raises(Malformed):
        apikeys.scopes_of(scopes)


@pytest.mark.parametrize("days", [0, 91, -1])
def test_refuses_when_a_key_would_live_too_long(lab: House, days: int) -> None:
    body = {"name": "k", "scopes": ["look"], "days": days}
    assert lab.post("/api/keys", body, lab.humans["rob"].session).status_code == 422
    assert _mint(lab, days=90)["key"]


def test_refuses_when_a_key_asks_for_what_needs_a_person(lab: House) -> None:
    key = str(_mint(lab)["key"])
    rob = lab.humans["rob"]
    step_up = {"code": lab.code(rob), "action": "launch", "bound": "sha256:" + "a" * 64}
    for path, body in (("/api/step-up", step_up), ("/api/logout", {}),
                       ("/api/keys", {"name": "child", "scopes": ["look"]})):
        refused = lab.post(path, body, key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "denied.person"), path
    assert lab.post("/api/step-up", step_up, rob.session).status_code == 200


def test_a_key_never_lends_a_proof(lab: House) -> None:
    """A person's proof named in a key's request: another session, another subject, no."""
    rob, key = lab.humans["rob"], str(_mint(lab)["key"])
    bound = "sha256:" + "a" * 64
    body = {"code": lab.code(rob), "action": "launch", "bound": bound}
    proof = lab.post("/api/step-up", body, rob.session).json()["step_up"]

    from starlette.requests import Request

    from interlock.errors import StepUpRequired

    request = Request({"type": "http", "method": "GET", "headers": [], "app": lab.app, "client": ("127.0.0.1", 1)})
    caller = context.caller_of(request, key)
    with pytest.raises(StepUpRequired):
        context.shown_proof(request, caller, proof, Action.LAUNCH, bound)
    person = context.caller_of(request, rob.session)
    assert context.shown_proof(request, person, proof, Action.LAUNCH, bound) is not None
