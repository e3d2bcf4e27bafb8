"""How the list of pinned officers changes: asked by one, signed by two who are pinned, checked by every node."""

import json
from dataclasses import replace as changed
from typing import Any

import pyotp
import pytest
from sqlalchemy import text

from control_plane import trust_change, trust_list
from control_plane.auth import approvals, totp
from control_plane.signing import bundle_signers
from control_plane.store import people
from control_plane.store.db import reading, writing
from control_plane.trust_list import TrustList
from interlock.errors import Conflict, Refusal, Untrusted
from interlock.signed import STOP, TRUST_APPROVAL, Signed, public_text, sign
from killswitch.trust import Trust, approval_body, first, replace
from tests.control_plane.conftest import Host, House, Human


@pytest.fixture
def trio(staffed: House) -> House:
    """Olga and omar are pinned; opal is an officer who waits."""
    staffed.person("opal", "safety_officer")
    return staffed


def code_of(answer: Any) -> str:
    return str(answer.json()["error"]["code"])


def ask(house: House, who: str = "ada", **change: Any) -> Any:
    return house.post("/api/trust/changes", house.people[who], {"add": [], "remove": [], "reason": "test", **change})


def asked(house: House, **change: Any) -> dict[str, Any]:
    answer = ask(house, **change)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


def fresh_code(house: House, human: Human) -> str:
    """A code that was never used: of a factor that the person has just got."""
    secret = totp.new_secret()
    with writing(house.parts.engine) as connection:
        connection.execute(text("UPDATE people SET totp_sealed = :s, totp_last = -1 WHERE id = :p"),
                           {"s": totp.seal(house.parts.kek, human.id, secret), "p": human.id})
    return pyotp.TOTP(secret).now()


def signature(human: Human, body: dict[str, Any], **other: Any) -> dict[str, Any]:
    statement = {name: body[name] for name in ("version", "persons_digest")}
    return sign(TRUST_APPROVAL, {**statement, **other}, human.key).as_json()


def vote(house: House, request: dict[str, Any], who: str, signed: dict[str, Any] | None = None) -> Any:
    human = house.people[who]
    return house.post(f"/api/approvals/{request['request']}/approve", human, {
        "code": fresh_code(house, human), "signed": signed or signature(human, request["body"])})


def newest(house: House) -> TrustList:
    with reading(house.parts.engine) as connection:
        return trust_list.newest(connection)


def ids(house: House, *names: str) -> set[str]:
    return {house.people[n].id for n in names}


def node_list(house: House, host: Host, version: int) -> Signed:
    """What a node that holds `version` is sent."""
    return Signed.from_json(host.beat(trust_version=version)["trust"])


def joined(house: House, host: Host) -> Trust:
    """The list that a node which joins now starts with."""
    return first(sent(house, host))


def sent(house: House, host: Host) -> Signed:
    """The newest list, signed for the node."""
    parts = house.parts
    signers = bundle_signers(parts.settings.places.trust)
    return trust_list.signed_for(host.name, newest(house), parts.signers, parts.settings, signers)


def pin(house: House, *by: str, **change: Any) -> dict[str, Any]:
    request = asked(house, **change)
    for name in by:
        done = vote(house, request, name)
        assert done.status_code == 200, done.text
    return request


def test_two_pinned_officers_add_a_third_and_nodes_accept_it(trio: House) -> None:
    host = trio.host()
    before, version = joined(trio, host), newest(trio).version
    request = asked(trio, add=["opal"])
    assert request["may_sign"] == ["olga", "omar"]
    assert [p["name"] for p in request["body"]["persons"]] == ["olga", "omar", "opal"]
    assert vote(trio, request, "olga").json()["missing"] == 1
    assert newest(trio).version == version
    assert host.beat(trust_version=version)["trust"] is None
    done = vote(trio, request, "omar").json()
    assert done["effect"] == {"trust": version + 1, "persons": sorted(ids(trio, "olga", "omar", "opal"))}
    after = replace(before, node_list(trio, host, version))
    assert set(after.persons) == ids(trio, "olga", "omar", "opal")
    assert host.beat(trust_version=version + 1)["trust"] is None
    trio.parts.ledger.lead()
    trio.parts.ledger.sequence()
    facts = [r.event["facts"] for r in trio.parts.ledger.rows(limit=500) if r.event["type"] == "node.trust_changed"][-1]
    assert (facts["version"], facts["added"], set(facts["approvers"])) == (
        version + 1, [trio.people["opal"].id], ids(trio, "olga", "omar"))
    assert trio.get(f"/api/approvals/{request['request']}", trio.people["olga"]).json()["state"] == "used"


def test_a_third_officer_resumes_what_the_first_one_stopped(trio: House) -> None:
    """The gap that two officers leave, and how the third closes it."""
    boss = trio.people["olga"]
    with writing(trio.parts.engine) as connection:
        people.set_roles(connection, boss.id, "lab", frozenset({"safety_officer", "on_call"}))
    order = trio.stop("everything", "olga")
    assert resume(trio, order, "omar", "opal") == "denied.unpinned"
    assert resume(trio, order, "olga") == "denied.self_approval"
    pin(trio, "olga", "omar", add=["opal"])
    assert resume(trio, order, "omar", "opal") == ""
    assert trio.get(f"/api/stops/{order}", boss).json()["cleared_by"]


def resume(house: House, order: str, *names: str) -> str:
    """Ask and vote; return the code of the first refusal, empty when it was ordered."""
    request = house.post("/api/resumes", house.people["cora"], {"clears": [order], "reason": "over"}).json()
    done: Any = None
    for name in names:
        human = house.people[name]
        done = house.post(f"/api/approvals/{request['request']}/approve", human, {
            "code": fresh_code(house, human), "signed": house.approval(request, human)})
        if done.status_code != 200:
            return code_of(done)
    assert done.json()["effect"]["clears"] == [order]
    return ""


@pytest.mark.parametrize("lost", ["role", "disabled", "administrator"])
def test_refuses_when_a_pinned_officer_is_no_officer_any_more(trio: House, lost: str) -> None:
    """He stays pinned on the nodes until trust changes; the control plane counts him no more, also not afterwards."""
    pin(trio, "olga", "omar", add=["opal"])
    omar = trio.people["omar"].id
    order = trio.stop("everything")
    request = trio.post("/api/resumes", trio.people["cora"], {"clears": [order], "reason": "over"}).json()
    given = trio.post(f"/api/approvals/{request['request']}/approve", trio.people["omar"], {
        "code": fresh_code(trio, trio.people["omar"]), "signed": trio.approval(request, trio.people["omar"])})
    assert given.json()["given"] == 1
    with writing(trio.parts.engine) as connection:
        if lost == "disabled":
            people.set_disabled(connection, omar, True)
        else:
            people.set_roles(connection, omar, "lab", frozenset({"safety_officer", lost} - {"role"})
                             if lost == "administrator" else frozenset())
    then = trio.post(f"/api/approvals/{request['request']}/approve", trio.people["olga"], {
        "code": fresh_code(trio, trio.people["olga"]), "signed": trio.approval(request, trio.people["olga"])}).json()
    assert (then["given"], "effect" in then) == (1, False)
    shown = trio.get("/api/trust", trio.people["ada"]).json()
    assert {p["name"]: p["able"] for p in shown["persons"]} == {"olga": True, "omar": False, "opal": True}
    assert "two pinned officers" in shown["warning"]
    last = trio.post(f"/api/approvals/{request['request']}/approve", trio.people["opal"], {
        "code": fresh_code(trio, trio.people["opal"]), "signed": trio.approval(request, trio.people["opal"])}).json()
    assert last["effect"]["clears"] == [order]


def test_refuses_when_one_person_signs_or_signs_twice(trio: House) -> None:
    version = newest(trio).version
    request = asked(trio, add=["opal"])
    assert vote(trio, request, "olga").status_code == 200
    assert code_of(vote(trio, request, "olga")) == "conflict.voted"
    one = vote(trio, request, "omar", signature(trio.people["olga"], request["body"]))
    assert one.status_code == 401
    assert newest(trio).version == version
    assert vote(trio, request, "omar").json()["effect"]["trust"] == version + 1


def test_refuses_when_the_signature_is_over_another_list(trio: House) -> None:
    request = asked(trio, add=["opal"])
    olga, body = trio.people["olga"], request["body"]
    other = approval_body(body["version"], {p["person"]: p["key"] for p in body["persons"][:2]})
    for signed in (
        signature(olga, other), signature(olga, body, version=body["version"] + 1), signature(olga, body, extra=1),
        signature(olga, body, persons_digest="sha256:" + "0" * 64), sign(STOP, other, olga.key).as_json(), {"a": 1},
    ):
        assert vote(trio, request, "olga", signed).status_code in (401, 422)
    refused = trio.post(f"/api/approvals/{request['request']}/approve", olga, {"code": fresh_code(trio, olga)})
    assert refused.status_code == 422
    assert vote(trio, request, "olga").json()["given"] == 1


def test_refuses_when_the_voter_is_administrator_unpinned_or_no_officer(trio: House) -> None:
    request = asked(trio, add=["opal"])
    assert code_of(vote(trio, request, "ada")) == "denied.self_approval"
    trio.person("abe", "administrator")
    assert code_of(vote(trio, request, "abe")) == "denied.no_role"
    assert code_of(vote(trio, request, "rob")) == "denied.no_role"
    assert code_of(vote(trio, request, "opal")) == "denied.unpinned"
    with writing(trio.parts.engine) as connection:  # whatever wrote it there: counting asks who is pinned
        connection.execute(text("INSERT INTO approval_votes (request, person, approve, reason, signed, at_us) VALUES "
                                "(:r, :p, true, '', :s, 1)"), {"r": request["request"], "p": trio.people["opal"].id,
                           "s": json.dumps(signature(trio.people["opal"], request["body"]))})
    assert vote(trio, request, "olga").json()["given"] == 1
    assert vote(trio, request, "omar").json()["given"] == 2


def test_refuses_when_the_registered_key_is_not_the_pinned_one(trio: House) -> None:
    """Somebody with the database swaps a person's key: nodes would not believe it, so it does not count here."""
    request = asked(trio, add=["opal"])
    omar, opal = trio.people["omar"], trio.people["opal"]
    with writing(trio.parts.engine) as connection:
        swap = text("UPDATE people SET person_key = :k WHERE id = :p")
        connection.execute(swap, {"k": "x" * 44, "p": opal.id})
        connection.execute(swap, {"k": public_text(opal.key.public_key()), "p": omar.id})
    forged = sign(TRUST_APPROVAL, approval_body(request["body"]["version"], {
        p["person"]: p["key"] for p in request["body"]["persons"]}), opal.key).as_json()
    assert code_of(vote(trio, request, "omar", forged)) == "denied.unpinned"
    assert vote(trio, request, "olga").json()["given"] == 1


def test_refuses_when_an_added_persons_key_or_role_changed_after_the_question(trio: House) -> None:
    for change, code in (
        ("disabled = true", "denied.no_role"), ("person_key = ''", "denied.no_role"),
        ("person_key = '" + "B" * 43 + "='", "conflict.approval_changed"),
    ):
        request = asked(trio, add=["opal"])
        assert vote(trio, request, "olga").status_code == 200
        with writing(trio.parts.engine) as connection:
            connection.execute(text(f"UPDATE people SET {change} WHERE id = :p"), {"p": trio.people["opal"].id})
        assert code_of(vote(trio, request, "omar")) == code
        assert trio.get(f"/api/approvals/{request['request']}", trio.people["olga"]).json()["state"] == "void"
        with writing(trio.parts.engine) as connection:
            connection.execute(text("UPDATE people SET disabled = false, person_key = :k WHERE id = :p"), {
                "p": trio.people["opal"].id, "k": public_text(trio.people["opal"].key.public_key())})
    pin(trio, "olga", "omar", add=["opal"])
    assert len(newest(trio).persons) == 3


def test_refuses_when_nobody_who_may_asks(trio: House) -> None:
    for who in ("olga", "rob", "cora"):
        assert code_of(ask(trio, who, add=["opal"])).startswith("denied")
    minted = trio.post("/api/keys", trio.people["ada"], {"name": "bot", "scopes": ["look"]})
    bot = changed(trio.people["ada"], session=minted.json()["key"])
    assert code_of(trio.post("/api/trust/changes", bot, {"add": ["opal"], "reason": "x"})) == "denied.person"
    assert ask(trio, "ada", add=["opal"]).status_code == 200


def test_refuses_when_names_are_off(trio: House) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "malformed.trust_change"), ({"add": ["opal"], "remove": ["opal"]}, "malformed.trust_change"),
        ({"add": ["nobody"]}, "not_found.person"), ({"add": ["rob"]}, "denied.no_role"),
        ({"add": ["ada"]}, "denied.no_role"), ({"add": ["olga"]}, "conflict.pinned"),
        ({"remove": ["opal"]}, "conflict.not_pinned"), ({"add": ["opal"], "reason": ""}, "malformed.request"),
    ]
    for change, code in cases:
        assert code_of(ask(trio, **change)) == code, change
    assert ask(trio, add=["opal"]).status_code == 200


def test_refuses_when_fewer_than_two_would_stay_pinned(trio: House) -> None:
    assert code_of(ask(trio, remove=["omar"])) == "conflict.trust_threshold"
    pin(trio, "olga", "omar", add=["opal"], remove=["omar"])  # a swap in one change keeps two
    assert set(newest(trio).keys) == ids(trio, "olga", "opal")


def test_refuses_when_two_pinned_officers_cannot_sign(trio: House) -> None:
    with writing(trio.parts.engine) as connection:
        people.set_disabled(connection, trio.people["omar"].id, True)
    assert code_of(ask(trio, add=["opal"], remove=["omar"])) == "conflict.signers"
    with writing(trio.parts.engine) as connection:
        people.set_disabled(connection, trio.people["omar"].id, False)
    assert ask(trio, add=["opal"], remove=["omar"]).status_code == 200


def test_refuses_when_the_first_two_are_not_pinned_yet(house: House) -> None:
    house.person("ada", "administrator")
    house.person("olga", "safety_officer")
    assert code_of(ask(house, add=["olga"])) == "conflict.bootstrap"
    assert "no stop can be resumed" in house.get("/api/status", house.people["ada"]).json()["trust"]["warning"]


def test_refuses_when_another_change_came_first(trio: House) -> None:
    trio.person("owen", "safety_officer")
    slow = asked(trio, add=["owen"])
    assert vote(trio, slow, "olga").status_code == 200
    pin(trio, "olga", "omar", add=["opal"])
    assert code_of(vote(trio, slow, "omar")) == "conflict.approval_changed"
    assert "owen" not in {p["name"] for p in trio.get("/api/trust", trio.people["ada"]).json()["persons"]}
    pin(trio, "omar", "opal", add=["owen"])
    assert len(newest(trio).persons) == 4


def test_a_node_that_slept_gets_each_version_in_turn(trio: House) -> None:
    """The last list is signed by persons whom the sleeper does not know yet."""
    host = trio.host()
    held, version = joined(trio, host), newest(trio).version
    pin(trio, "olga", "omar", add=["opal"])
    pin(trio, "omar", "opal", remove=["olga"])
    with pytest.raises(Untrusted, match="approved this trust list"):
        replace(held, sent(trio, host))
    for step in (1, 2):
        held = replace(held, node_list(trio, host, version + step - 1))
        assert held.version == version + step
    assert set(held.persons) == ids(trio, "omar", "opal")


def test_refuses_when_an_older_list_is_replayed(trio: House) -> None:
    host = trio.host()
    version = newest(trio).version
    pin(trio, "olga", "omar", add=["opal"])
    with_opal = node_list(trio, host, version)
    pin(trio, "olga", "omar", remove=["opal"])
    held = joined(trio, host)
    with pytest.raises(Conflict) as refused:
        replace(held, with_opal)
    assert refused.value.code == "conflict.trust_version"
    pin(trio, "olga", "omar", add=["opal"])
    assert len(replace(held, node_list(trio, host, held.version)).persons) == 3


def test_a_restored_database_never_uses_a_version_twice(trio: House) -> None:
    host = trio.host()
    version = newest(trio).version
    host.beat(trust_version=version + 2)
    assert asked(trio, add=["opal"])["body"]["version"] == version + 3
    host.beat(trust_version=2**53 - 1)  # no backup lost that many: a node does not use up the numbers
    assert asked(trio, add=["opal"])["body"]["version"] == version + 1


def test_refuses_when_a_supervisor_would_refuse_the_list(trio: House) -> None:
    """The last check before a version is published is the supervisor's own."""
    held = newest(trio)
    opal = trio.people["opal"]
    persons = [*held.persons, {"person": opal.id, "key": public_text(opal.key.public_key())}]
    made = TrustList(held.version + 1, persons, [], held.cooldown_ms)
    with pytest.raises(Untrusted):
        trust_change.check(trio.parts, held, made)
    body = approval_body(made.version, made.keys)
    signed = [sign(TRUST_APPROVAL, body, trio.people[n].key).as_json() for n in ("olga", "omar")]
    trust_change.check(trio.parts, held, changed(made, approvals=signed))


def test_a_shorter_cool_down_of_the_settings_does_not_void_a_change(trio: House) -> None:
    host = trio.host()
    with writing(trio.parts.engine) as connection:
        connection.execute(text("UPDATE trust_versions SET body = replace(body, '\"cooldown_ms\": 0', "
                                "'\"cooldown_ms\": 9000')"))
    held = joined(trio, host)
    assert (held.cooldown_ms, trio.parts.settings.cooldown_ms) == (9000, 0)
    pin(trio, "olga", "omar", add=["opal"])
    assert replace(held, node_list(trio, host, held.version)).cooldown_ms == 9000


def test_shows_the_list_who_waits_and_what_nodes_hold(trio: House) -> None:
    host = trio.host()
    version = newest(trio).version
    host.beat(trust_version=version)
    request = asked(trio, add=["opal"])
    shown = trio.get("/api/trust", trio.people["rob"]).json()
    assert [p["name"] for p in shown["persons"]] == ["olga", "omar"]
    assert [p["name"] for p in shown["waiting"]] == ["opal"]
    assert (shown["nodes"], shown["requests"]) == ([{"node": "n1", "version": version}], [request["request"]])
    assert "pin a third" in shown["warning"]
    assert trio.get("/api/status", trio.people["ada"]).json()["trust"]["warning"] == shown["warning"]
    for name in ("olga", "omar"):
        assert vote(trio, request, name).status_code == 200
    shown = trio.get("/api/trust", trio.people["rob"]).json()
    assert (shown["waiting"], shown["requests"], shown["warning"]) == ([], [], "")


def test_one_refusal_ends_a_change(trio: House) -> None:
    request, omar = asked(trio, add=["opal"]), trio.people["omar"]
    assert vote(trio, request, "olga").status_code == 200
    done = trio.post(f"/api/approvals/{request['request']}/refuse", omar, {"code": fresh_code(trio, omar)})
    assert done.json()["state"] == "refused"
    assert code_of(vote(trio, request, "omar")) == "conflict.approval_refused"
    assert len(newest(trio).persons) == 2


def test_refuses_when_an_approval_is_used_for_something_else(trio: House) -> None:
    request = asked(trio, add=["opal"])
    with writing(trio.parts.engine) as connection, pytest.raises(Refusal):
        approvals.use(connection, request["request"], kind=approvals.LAUNCH, bound=request["digest"])
    pin(trio, "olga", "omar", add=["opal"])
