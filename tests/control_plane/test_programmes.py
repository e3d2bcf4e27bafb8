"""Partner programmes: who enrols, what it takes, what a node hears of it; what else its snapshot tells."""

from typing import Any

import pytest
from sqlalchemy import update

from control_plane.api import node_routes
from control_plane.auth import apikeys
from control_plane.auth.sessions import hash_of
from control_plane.store import people, programmes
from control_plane.store.db import now_us, writing
from control_plane.store.tables import api_keys, programme_members, sessions
from interlock.canon import parse
from interlock.errors import Conflict, Malformed
from interlock.signed import Signed
from policy.snapshot import Snapshot, verify
from tests.control_plane.conftest import House
from tests.control_plane.test_node_link import Link
from tests.control_plane.test_node_link import link as link  # a fixture
from tests.control_plane.test_registry import approved, code_for, code_of, live, records, register, trained

PATH = "/api/programmes/trusted-testers/members"


def enrol(house: House, who: str = "olga", **body: Any) -> Any:
    human = house.people[who]
    code = body.pop("code", None) or code_for(house, human)
    return house.post(PATH, human, {
        "person": "paula", "organisation": "Partner GmbH", "days": 30, "code": code, **body})


def end(house: House, who: str = "olga", **body: Any) -> Any:
    return house.client.request("DELETE", f"{PATH}/paula", json=body, headers=house.people[who].headers)


def stale_factors(house: House) -> None:
    with writing(house.parts.engine) as connection:
        connection.execute(update(sessions).values(created_us=sessions.c.created_us - 400_000_000))


@pytest.fixture
def lab(staffed: House) -> House:
    staffed.person("paula")
    return staffed


def test_a_safety_officer_enrols_and_ends(lab: House) -> None:
    assert programmes_of(lab) == frozenset()
    answer = enrol(lab)
    assert answer.status_code == 200, answer.text
    assert abs(answer.json()["until_us"] - now_us() - 30 * 86_400_000_000) < 60_000_000
    assert programmes_of(lab) == {"trusted-testers"}
    assert enrol(lab, days=60).json()["until_us"] > answer.json()["until_us"]
    shown = lab.get("/api/programmes", lab.people["olga"]).json()["members"]
    assert [(m["name"], m["organisation"], m["state"]) for m in shown] == [("paula", "Partner GmbH", "live")]
    assert end(lab, code=code_for(lab, lab.people["olga"])).status_code == 200
    assert programmes_of(lab) == frozenset()
    assert code_of(end(lab, code=code_for(lab, lab.people["olga"]))) == "not_found.member"
    assert [r["facts"]["joined"] for r in records(lab, "identity.partner_enrolled")] == [True, True, False]


def programmes_of(house: House, who: str = "paula") -> frozenset[str]:
    with writing(house.parts.engine) as connection:
        return programmes.of_person(connection, house.people[who].id, now_us())


@pytest.mark.parametrize("who", ["ada", "rob", "cora"])
def test_nobody_else_enrols(lab: House, who: str) -> None:
    assert code_of(enrol(lab, who)) == "denied.no_match"
    assert programmes_of(lab) == frozenset()
    assert enrol(lab).status_code == 200


def test_enrolling_takes_a_fresh_code_for_exactly_this(lab: House) -> None:
    olga = lab.people["olga"]
    assert code_of(enrol(lab, code="000000")) == "untrusted.factor"
    assert lab.post(PATH, olga, {"person": "paula", "organisation": "x", "days": 1}).status_code == 422
    code = code_for(lab, olga)
    assert enrol(lab, code=code).status_code == 200
    assert code_of(enrol(lab, code=code)) == "untrusted.factor"  # used


def test_ending_needs_a_factor_that_is_fresh(lab: House) -> None:
    assert enrol(lab).status_code == 200
    stale_factors(lab)
    assert code_of(end(lab)) == "step_up_required"
    assert programmes_of(lab) == {"trusted-testers"}
    assert end(lab, code=code_for(lab, lab.people["olga"])).status_code == 200


@pytest.mark.parametrize(("change", "code"), [
    ({"days": 366}, "malformed.request"), ({"days": 0}, "malformed.request"),
    ({"person": "nobody"}, "not_found.person"), ({"person": "olga"}, "denied.self_approval"),
    ({"organisation": ""}, "malformed.request"), ({"role": "administrator"}, "malformed.request"),
])
def test_refuses_what_is_no_membership(lab: House, change: dict[str, Any], code: str) -> None:
    assert code_of(enrol(lab, **change)) == code
    assert enrol(lab, days=365).status_code == 200


def test_others_see_only_their_own_membership(lab: House) -> None:
    assert enrol(lab).status_code == 200
    assert lab.get("/api/programmes", lab.people["rob"]).json()["members"] == []
    assert len(lab.get("/api/programmes", lab.people["paula"]).json()["members"]) == 1
    assert len(lab.get("/api/programmes", lab.people["cora"]).json()["members"]) == 1


# --- what nodes hear --------------------------------------------------------------------------------
def snapshot(link: Link, host: Any) -> Snapshot:
    answer = link.send(host, "GET", "/node/snapshot?nonce=abcdefgh").json()
    return verify(Signed.from_json(answer), link.house.parts.signers.grant_pins, "abcdefgh")


def test_the_snapshot_tells_live_memberships_alone(link: Link) -> None:
    house = link.house
    host, paula = house.host(), house.person("paula")
    assert enrol(house).status_code == 200
    assert snapshot(link, host).programmes_of(paula.id) == {"trusted-testers"}
    with writing(house.parts.engine) as connection:
        connection.execute(update(programme_members).values(until_us=now_us() - 1))
    assert snapshot(link, host).memberships == frozenset()
    assert enrol(house).status_code == 200
    assert snapshot(link, host).programmes_of(paula.id) == {"trusted-testers"}
    with writing(house.parts.engine) as connection:
        people.set_disabled(connection, paula.id, True)
    assert snapshot(link, host).memberships == frozenset()


def test_the_snapshot_tells_live_keys_alone(link: Link) -> None:
    house = link.house
    host, rob = house.host(), house.people["rob"]
    minted = [house.post("/api/keys", rob, {"name": f"k{n}", "scopes": ["infer"]}).json() for n in range(3)]
    found = snapshot(link, host).keys
    assert set(found) == {k["id"] for k in minted}
    one = found[minted[0]["id"]]
    assert (one.hash, one.person, one.tenant) == (hash_of(minted[0]["key"]), rob.id, "lab")
    assert one.scopes == {"infer"}
    assert house.client.delete(f"/api/keys/{minted[0]['id']}", headers=rob.headers).status_code == 200
    with writing(house.parts.engine) as connection:
        connection.execute(update(api_keys).where(api_keys.c.id == minted[1]["id"]).values(expires_us=now_us() - 1))
    assert set(snapshot(link, host).keys) == {minted[2]["id"]}
    with writing(house.parts.engine) as connection:
        people.set_disabled(connection, rob.id, True)
    assert not snapshot(link, host).keys


def test_the_snapshot_tells_approved_and_served_models(link: Link) -> None:
    house = link.house
    host = house.host()
    run, version = trained(house)
    register(house, run)
    assert snapshot(link, host).models == ()
    approved(house, version)
    row = snapshot(link, host).model("aurora")
    assert row is not None
    assert (row.version, row.state, row.tenant, row.tier.value, row.lineage) == (version, "approved", "lab", "none", ())
    engine = house.post(f"/api/versions/{version}/serve", house.people["rob"], {}).json()["run"]
    live(house, engine)
    other = house.host("n2")
    assert code_of(link.send(other, "POST", f"/node/runs/{engine}/1/ready", json={})) == "denied.node"
    answer = link.send(host, "POST", f"/node/runs/{engine}/1/ready", json={})
    assert (answer.status_code, answer.json()["state"]) == (200, "serving"), answer.text
    row = snapshot(link, host).model("aurora")
    assert row is not None
    assert row.state == "serving"
    assert house.post(f"/api/versions/{version}/retire", house.people["rob"], {}).status_code == 200
    assert snapshot(link, host).models == ()


def test_nobody_fills_the_snapshot_with_keys(lab: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apikeys, "MAX_LIVE", 2)
    rob = lab.people["rob"].id
    with writing(lab.parts.engine) as connection:
        for number in range(2):
            _, row = apikeys.mint(connection, rob, f"k{number}", ["infer"], 1)
        with pytest.raises(Conflict) as caught:
            apikeys.mint(connection, rob, "k3", ["infer"], 1)
        assert caught.value.code == "conflict.key_quota"
        connection.execute(update(api_keys).where(api_keys.c.id == row.id).values(revoked_us=1))
        assert apikeys.mint(connection, rob, "k3", ["infer"], 1)
        monkeypatch.setattr(apikeys, "MAX_SITE", 2)
        with pytest.raises(Conflict):  # of all persons together
            apikeys.mint(connection, lab.people["olga"].id, "k4", ["infer"], 1)
        monkeypatch.setattr(apikeys, "MAX_SITE", 3)
        assert apikeys.mint(connection, lab.people["olga"].id, "k4", ["infer"], 1)


def test_a_snapshot_that_no_node_reads_is_not_given_out(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails closed and says so; a stop goes on."""
    house = link.house
    host = house.host()
    assert snapshot(link, host).roles
    largest = b'"' + b"x" * (node_routes.MAX_SNAPSHOT - 2) + b'"'
    assert parse(largest)
    with pytest.raises(Malformed):
        parse(largest[:-1] + b'x"')
    monkeypatch.setattr(node_routes, "MAX_SNAPSHOT", 200)
    for _ in range(2):
        assert code_of(link.send(host, "GET", "/node/snapshot?nonce=abcdefgh")) == "unavailable.snapshot"
    house.parts.desk.record_late()
    house.parts.ledger.sequence()
    (told,) = [r.event for r in house.parts.ledger.newest(type="incident.raised")]
    assert (told["facts"]["code"], told["facts"]["roles"]) == ("unavailable.snapshot", 5)
    order = house.stop("everything")
    assert [Signed.from_json(o).body()["id"] for o in host.beat()["orders"]] == [order]
