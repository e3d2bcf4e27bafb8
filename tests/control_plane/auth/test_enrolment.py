"""Links and enrolment: one use, one administrator, nothing active before the code."""

import pytest
from sqlalchemy import text

from control_plane.auth import links, login
from control_plane.store import people
from control_plane.store.db import now_us, writing
from interlock.errors import Conflict
from interlock.signed import public_text
from tests.control_plane.auth.conftest import PASSWORD, House, Phone, at_once, raw_key


def _begin(house: House, secret: str, name: str) -> str:
    body = {"secret": secret, "name": name, "password": PASSWORD, "person_key": raw_key()}
    answer = house.post("/api/enrol", body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["totp_secret"])


def test_bootstrap_makes_the_administrator_and_records_it(house: House) -> None:
    me = house.get("/api/whoami", house.humans["ada"].session).json()
    assert me["roles"] == ["administrator"]
    assert me["site"] == "bootstrap"
    enrolled = house.events("identity.enrolled")
    assert [e["facts"]["name"] for e in enrolled] == ["ada"]
    assert len(house.events("identity.bootstrap_link")) == 1


def test_refuses_when_an_administrator_has_enrolled(house: House) -> None:
    with pytest.raises(Conflict) as caught:
        links.bootstrap(house.engine, house.site.ledger)
    assert caught.value.code == "conflict.bootstrapped"
    assert links.recover(house.engine, house.site.ledger)  # positive control: the recorded way is open


def test_refuses_a_second_bootstrap_link_after_the_first_was_used(empty: House) -> None:
    """Two links were open at once; the second is closed by the first administrator."""
    first = links.bootstrap(empty.engine, empty.site.ledger)
    with writing(empty.engine) as connection:  # as if it had been made at the same moment
        second, _ = links._add(connection, "bootstrap", "", "lab", ("administrator",), "local", now_us() + 10**9)
    pending = _begin(empty, second, "eve")
    empty.enrol(first, "ada")
    refused = empty.post("/api/enrol/confirm", {"secret": second, "code": Phone(pending).at(empty.clock.next())})
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "conflict.bootstrapped"


def test_a_new_bootstrap_link_voids_the_older(empty: House) -> None:
    old = links.bootstrap(empty.engine, empty.site.ledger)
    new = links.bootstrap(empty.engine, empty.site.ledger)
    body = {"name": "ada", "password": PASSWORD, "person_key": raw_key()}
    assert empty.post("/api/enrol", {"secret": old, **body}).status_code == 401
    assert empty.post("/api/enrol", {"secret": new, **body}).status_code == 200


def test_recovery_is_recorded_first_and_makes_an_administrator(house: House) -> None:
    secret = links.recover(house.engine, house.site.ledger)
    assert len(house.events("identity.recovery")) == 1
    human = house.enrol(secret, "anna")
    assert house.get("/api/whoami", human.session).json()["roles"] == ["administrator"]


@pytest.mark.parametrize("kind", ["bootstrap", "invitation"])
def test_a_link_works_once_under_16_threads(empty: House, kind: str) -> None:
    """16 confirmations at once, each with a code of its own step: exactly one becomes a person."""
    if kind == "bootstrap":
        secret, name = links.bootstrap(empty.engine, empty.site.ledger), "ada"
    else:
        empty.enrol(links.bootstrap(empty.engine, empty.site.ledger), "ada")
        secret, name = empty.invite("rob", "researcher"), "rob"
    phone = Phone(_begin(empty, secret, name))
    codes = [phone.at(empty.clock.next()), phone.at(empty.clock.next())]
    answers = at_once(16, lambda n: empty.post("/api/enrol/confirm", {"secret": secret, "code": codes[n % 2]}))
    assert [a.status_code for a in answers].count(200) == 1
    again = empty.post("/api/enrol/confirm", {"secret": secret, "code": phone.at(empty.clock.next())})
    assert again.status_code == 401
    assert again.json()["error"]["code"] == "untrusted.link"
    assert empty.post("/api/enrol", {"secret": secret, "name": "mal", "password": PASSWORD,
                                     "person_key": raw_key()}).status_code == 401


def test_a_link_is_used_up_by_one_statement(empty: House) -> None:
    """Below the checks: 16 transactions that all saw the link unused; one may have it."""
    hash_ = links.hash_of(links.bootstrap(empty.engine, empty.site.ledger))

    def use(_: int) -> bool:
        with writing(empty.engine) as connection:
            return people.use_link(connection, hash_, "", now_us())

    assert sorted(at_once(16, use)) == [False] * 15 + [True]


def test_refuses_when_the_link_is_too_old(empty: House) -> None:
    secret = links.bootstrap(empty.engine, empty.site.ledger)
    body = {"secret": secret, "name": "ada", "password": PASSWORD, "person_key": raw_key()}
    assert empty.post("/api/enrol", body).status_code == 200
    with writing(empty.engine) as connection:
        connection.execute(text("UPDATE links SET expires_us = 1"))
    assert empty.post("/api/enrol", body).status_code == 401


def test_the_secret_is_kept_as_a_hash_only(empty: House) -> None:
    secret = links.bootstrap(empty.engine, empty.site.ledger)
    with writing(empty.engine) as connection:
        rows = connection.execute(text("SELECT * FROM links")).all()
        outbox = connection.execute(text("SELECT body FROM ledger_outbox")).all()
    assert secret not in repr(rows)
    assert secret not in repr(outbox)


def test_refuses_sign_in_before_the_code_was_confirmed(empty: House) -> None:
    secret = links.bootstrap(empty.engine, empty.site.ledger)
    pending = _begin(empty, secret, "ada")
    body = {"name": "ada", "password": PASSWORD}
    assert empty.post("/api/login", body).status_code == 401
    code = Phone(pending).at(empty.clock.next())
    assert empty.post("/api/enrol/confirm", {"secret": secret, "code": code}).status_code == 200
    assert empty.post("/api/login", body).status_code == 200


def test_I4_confirmation_is_throttled(empty: House) -> None:
    secret = links.bootstrap(empty.engine, empty.site.ledger)
    pending = _begin(empty, secret, "ada")
    body = {"secret": secret, "code": "000000"}
    codes = [empty.post("/api/enrol/confirm", body).status_code for _ in range(11)]
    assert codes == [401] * 10 + [429]
    right = Phone(pending).at(empty.clock.next())
    assert empty.post("/api/enrol/confirm", {"secret": secret, "code": right}).status_code == 429


def test_refuses_two_persons_with_one_person_key(lab: House) -> None:
    secret = lab.invite("max", "safety_officer")
    body = {"secret": secret, "name": "max", "password": PASSWORD}
    stolen = public_text(lab.humans["sue"].key.public_key())
    refused = lab.post("/api/enrol", {**body, "person_key": stolen})
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "conflict.person_key"
    assert lab.post("/api/enrol", {**body, "person_key": raw_key()}).status_code == 200


@pytest.mark.parametrize("change", [{"name": "Bad Name"}, {"password": "short"}, {"password": "passwordpassword"},
                                    {"person_key": "AAAA"}, {"roles": ["administrator"]}, {"tenant": "other"}])
def test_refuses_when_an_enrolment_is_malformed(empty: House, change: dict[str, object]) -> None:
    secret = links.bootstrap(empty.engine, empty.site.ledger)
    good = {"secret": secret, "name": "ada", "password": PASSWORD, "person_key": raw_key()}
    refused = empty.post("/api/enrol", {**good, **change})
    assert refused.status_code == 422
    assert str(change.get("password", PASSWORD)) not in refused.text
    assert empty.post("/api/enrol", good).status_code == 200


def test_refuses_an_invitation_by_another_name_and_roles_come_from_the_link(house: House) -> None:
    secret = house.invite("rob", "researcher")
    body = {"secret": secret, "password": PASSWORD, "person_key": raw_key()}
    assert house.post("/api/enrol", {**body, "name": "max"}).status_code == 422
    human = house.enrol(secret, "rob")
    assert house.get("/api/whoami", human.session).json()["roles"] == ["researcher"]


def test_refuses_when_somebody_else_invites(lab: House) -> None:
    body = {"name": "max", "roles": ["safety_officer"], "tenant": "lab"}
    for name in ("rob", "sue", "olly"):
        refused = lab.post("/api/invitations", body, lab.humans[name].session)
        assert refused.status_code == 403, name
    assert lab.post("/api/invitations", body, lab.humans["ada"].session).status_code == 200


@pytest.mark.parametrize("roles", [["administrator", "safety_officer"], ["auditor", "on_call"]])
def test_refuses_duties_that_exclude_each_other(house: House, roles: list[str]) -> None:
    body = {"name": "max", "roles": roles, "tenant": "lab"}
    refused = house.post("/api/invitations", body, house.humans["ada"].session)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "conflict.duties"
    assert house.post("/api/invitations", {**body, "roles": roles[:1]}, house.humans["ada"].session).status_code == 200


def test_refuses_a_name_that_is_taken_or_invited(house: House) -> None:
    house.invite("rob", "researcher")
    for name in ("rob", "ada"):
        body = {"name": name, "roles": ["on_call"], "tenant": "lab"}
        assert house.post("/api/invitations", body, house.humans["ada"].session).status_code == 409


def test_site_is_ready_with_two_officers(house: House) -> None:
    session = house.humans["ada"].session
    house.join("sue", "safety_officer")
    assert house.get("/api/whoami", session).json()["site"] == "bootstrap"
    house.join("sam", "safety_officer")
    assert house.get("/api/whoami", session).json()["site"] == "ready"


def test_refuses_an_approver_without_a_person_key(lab: House) -> None:
    """A browser has no key to give: enough for everybody but who signs resumes."""
    for name, role, status in (("max", "safety_officer", 422), ("mia", "researcher", 200)):
        body = {"secret": lab.invite(name, role), "password": PASSWORD, "person_key": ""}
        assert lab.post("/api/enrol", body).status_code == status, name
    with writing(lab.engine) as connection:
        connection.execute(text("UPDATE people SET person_key = '' WHERE name = 'rob'"))
    with pytest.raises(Conflict) as caught:
        login.change_roles(lab.site, lab.humans["rob"].id, frozenset({"safety_officer"}), by="test")
    assert caught.value.code == "conflict.person_key"
    login.change_roles(lab.site, lab.humans["olly"].id, frozenset({"safety_officer"}), by="test")
