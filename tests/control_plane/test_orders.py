"""Guards G4 to G10 of protocol.md, on a real SQLite file and a real order log folder."""

import contextlib
import json
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from control_plane import app as joint
from control_plane import issuer, proof, resume
from control_plane.order_log import AcceptedList, OrderLog
from control_plane.store import nodes, orders, people, runs
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Call, Resource, Subject, new_id
from interlock.errors import Conflict, Denied, Halted, Refusal, Unavailable, Untrusted
from interlock.order import Labels, Lease, Plan
from interlock.signed import GRANT, LEASE, RECEIPT, RESUME, STOP, STOPS, TRUST, Signed, sign, verify
from interlock.tier import Tier
from policy.facts import Facts
from tests.control_plane.conftest import Host, House


def backup(house: House) -> Path:
    """Copy the database as a backup program does."""
    copy = house.state / "backup.db"
    with (contextlib.closing(sqlite3.connect(house.parts.settings.places.control / "control.db")) as source,
          contextlib.closing(sqlite3.connect(copy)) as target):
        source.backup(target)
    return copy


def restore(house: House, copy: Path) -> None:
    """Put the backup in place and build the parts again, as a restart does, WITHOUT catching up yet."""
    house.parts.desk.close()
    house.parts.engine.dispose()
    control = house.parts.settings.places.control
    for name in ("control.db-wal", "control.db-shm"):
        (control / name).unlink(missing_ok=True)
    shutil.copyfile(copy, control / "control.db")  # keeps the 0600 of the file that is there
    house.parts = joint.build(house.parts.settings)
    house.parts.slot.load()
    house.client.close()
    house.client = TestClient(joint.people_app(house.parts))


def standing(house: House) -> Any:
    return house.parts.desk.standing_now()


def live(house: House, host: Host, **plan: Any) -> str:
    """A run that has a lease."""
    run = house.launch(**plan)
    assert len(host.beat((run, 1))["leases"]) == 1
    return run


def test_a_lease_is_signed_for_nonce_run_and_node(staffed: House) -> None:
    host = staffed.host()
    run = staffed.launch()
    answer = host.beat((run, 1))
    body = verify(Signed.from_json(answer["leases"][0]), LEASE, staffed.parts.signers.grant_pins)
    lease = Lease.from_json(body)
    assert (lease.run, lease.attempt, lease.node, lease.duration_ms) == (run, 1, "n1", 60_000)
    assert answer["refused"] == []


def test_G4_refuses_when_the_database_is_behind_the_order_log(staffed: House) -> None:
    """Restore of a database from before a stop that names another run: no lease, no permit, until caught up."""
    host = staffed.host()
    run = live(staffed, host)
    other = live(staffed, host)
    copy = backup(staffed)
    staffed.stop(f"run:{other}")
    restore(staffed, copy)
    host.parts = staffed.parts
    answer = host.beat((run, 1))
    assert answer["leases"] == []
    assert answer["refused"] == []  # silence, not REFUSED: nothing is known against this run
    with pytest.raises(Refusal) as refused:
        staffed.parts.gate.ask(_launch_call(staffed), Facts(roles=frozenset({"researcher"}), bundle_age_ms=0))
    assert refused.value.code == "stopped.unreadable"
    assert standing(staffed).why == "recovering"
    staffed.parts.desk.catch_up()
    assert len(host.beat((run, 1))["leases"]) == 1  # positive control: caught up, leases flow again
    assert host.beat((other, 1))["refused"][0]["code"] == "stopped.order"


def _launch_call(house: House) -> Any:
    rob = house.people["rob"]
    return Call(Action.LAUNCH, Subject(rob.id, "lab", "person", rob.id), Resource("pool", "default", "lab"))


def test_G4_a_restored_database_grants_nothing_to_the_stopped_run(staffed: House) -> None:
    host = staffed.host()
    run = live(staffed, host)
    copy = backup(staffed)
    staffed.stop(f"run:{run}")
    restore(staffed, copy)
    host.parts = staffed.parts
    answer = host.beat((run, 1))
    assert answer["leases"] == []
    assert answer["refused"][0]["code"] == "stopped.order"


def test_G4_recovering_voids_what_was_asked_before(staffed: House) -> None:
    staffed.host()
    order = staffed.stop("everything")
    question = resume.ask(staffed.parts.desk, "req", [order], 0)
    copy = backup(staffed)
    staffed.stop("tenant:other")
    restore(staffed, copy)
    staffed.parts.desk.catch_up()
    question = resume.Question(question.request, question.clears, staffed.parts.desk.head(), question.asked_us)
    with pytest.raises(Conflict, match="restored"):
        resume.order(staffed.parts.desk, staffed.parts.signers.grant, question, [], 0)


def test_G5_refuses_when_an_accepted_stop_is_not_in_the_order_log(staffed: House) -> None:
    """The order log was away while a stop was taken; then the database is restored. The own list remembers."""
    host = staffed.host()
    run, other = live(staffed, host), live(staffed, host)
    copy = backup(staffed)
    away = staffed.state / "away"
    staffed.parts.desk.log.folder.rename(away)
    stopped = staffed.post("/api/stop", staffed.people["cora"], {"scope": f"run:{other}", "reason": "x"}).json()
    assert stopped["anchored"] is False
    away.rename(staffed.parts.desk.log.folder)
    restore(staffed, copy)
    host.parts = staffed.parts
    assert host.beat((run, 1))["leases"] == []
    assert standing(staffed).why == "unanchored"
    staffed.parts.desk.catch_up()
    assert standing(staffed).grant_ok
    assert len(host.beat((run, 1))["leases"]) == 1
    assert host.beat((other, 1))["refused"][0]["code"] == "stopped.order"


def test_order_log_away_a_stop_is_accepted_and_nothing_is_granted(staffed: House) -> None:
    host = staffed.host()
    run, other = live(staffed, host), live(staffed, host)
    log = staffed.parts.desk.log.folder
    log.rename(staffed.state / "away")
    began = time.monotonic()
    stopped = staffed.post("/api/stop", staffed.people["cora"], {"scope": f"run:{run}", "reason": "x"})
    assert stopped.status_code == 200
    assert time.monotonic() - began < 2
    assert stopped.json()["anchored"] is False
    assert [s.body()["id"] for _, s in staffed.parts.desk.feed(0)[0]] == [stopped.json()["order"]]
    assert host.beat((run, 1))["refused"][0]["code"] == "stopped.order"
    assert host.beat((other, 1))["leases"] == []
    plan = {"argv": ["x"], "tier": "none", "tenant": "lab"}
    refused = staffed.post("/api/runs", staffed.people["rob"], {"plan": plan})
    assert refused.json()["error"]["code"] == "unavailable.order_log"
    (staffed.state / "away").rename(log)
    staffed.parts.desk.catch_up()
    assert len(host.beat((other, 1))["leases"]) == 1
    with reading(staffed.parts.engine) as connection:
        row = orders.one(connection, stopped.json()["order"])
    assert row is not None
    assert row.n == 1


def test_G6_the_standing_is_read_in_the_granting_transaction(staffed: House) -> None:
    """A stop that arrives between the gate's answer and the grant is seen: the permit is void."""
    staffed.host()
    rob = staffed.people["rob"]
    permit = staffed.parts.gate.ask(_launch_call(staffed), Facts(roles=frozenset({"researcher"}), bundle_age_ms=0))
    placement = _placement(rob.id)
    staffed.stop("tenant:elsewhere")
    with pytest.raises(Halted) as refused:
        issuer.place(staffed.parts.desk, staffed.parts.signers, permit, placement, "pool/default")
    assert refused.value.code == "stopped.epoch"
    permit = staffed.parts.gate.ask(_launch_call(staffed), Facts(roles=frozenset({"researcher"}), bundle_age_ms=0))
    order = issuer.place(staffed.parts.desk, staffed.parts.signers, permit, placement, "pool/default")
    assert order.epoch == standing(staffed).epoch


def _placement(person: str) -> issuer.Placement:
    run = new_id("run")
    labels = Labels("lab", person, person, run, "n1", Tier.NONE)
    return issuer.Placement(run, 1, labels, Plan(("x",), Tier.NONE, "lab"), {})


def test_G7_refuses_a_lease_for_a_permit_older_than_stop_and_resume(staffed: House) -> None:
    """The push was lost, stop and resume are over, nothing is stopped: the old permit still gets nothing."""
    host = staffed.host()
    old = live(staffed, host)
    apart = live(staffed, host)
    order = staffed.stop(f"run:{old}")
    lift(staffed, order)
    assert standing(staffed).active == []
    assert host.beat((old, 1))["refused"][0]["code"] == "stopped.epoch"
    assert len(host.beat((apart, 1))["leases"]) == 1  # a run that no order matched goes on
    fresh = live(staffed, host)  # and a permit from after the resume is good
    assert fresh


def votes(house: House, question: resume.Question, *names: str, **other: Any) -> list[resume.Vote]:
    found = []
    for name in names:
        human = house.people[name]
        asked = {"body": question.body()}
        found.append(resume.Vote(human.id, _key(house, human.id), True,
                                 Signed.from_json(house.approval(asked, human, **other))))
    return found


def _key(house: House, person: str) -> str:
    with reading(house.parts.engine) as connection:
        found = people.by_id(connection, person)
    assert found is not None
    return found.person_key


def lift(house: House, *stops: str, by: tuple[str, ...] = ("olga", "omar")) -> Any:
    question = resume.ask(house.parts.desk, new_id("req"), list(stops), 0)
    return resume.order(house.parts.desk, house.parts.signers.grant, question, votes(house, question, *by), 0)


def test_resume_by_two_officers_lifts_exactly_what_it_names(staffed: House) -> None:
    staffed.host()
    first, second = staffed.stop("tenant:lab"), staffed.stop("tenant:other")
    made = lift(staffed, first)
    assert made.epoch > 2
    assert [s.id for s in standing(staffed).active] == [second]
    assert staffed.parts.desk.feed(0)[0][-1][1].body()["id"] == made.id


def test_refuses_when_one_person_resumes(staffed: House) -> None:
    order = staffed.stop("everything")
    with pytest.raises(Denied) as refused:
        lift(staffed, order, by=("olga",))
    assert refused.value.code == "denied.threshold"
    with pytest.raises(Denied):
        lift(staffed, order, by=("olga", "olga"))
    assert [s.id for s in standing(staffed).active] == [order]
    lift(staffed, order)
    assert standing(staffed).active == []


def test_refuses_when_the_stopper_resumes(staffed: House) -> None:
    omar = staffed.person("oona", "safety_officer", "on_call")
    order = staffed.stop("everything", "oona")
    with pytest.raises(Denied) as refused:
        lift(staffed, order, by=("olga", "oona"))
    assert refused.value.code == "denied.same_person"
    assert omar
    lift(staffed, order)


def test_refuses_when_the_owner_of_a_stopped_run_resumes(staffed: House) -> None:
    staffed.host()
    owner = staffed.person("otto", "safety_officer", "researcher")
    staffed.launch(owner)
    order = staffed.stop("everything")
    with pytest.raises(Denied) as refused:
        lift(staffed, order, by=("olga", "otto"))
    assert refused.value.code == "denied.same_person"
    lift(staffed, order)


def test_refuses_when_the_head_moved_since_the_approval(staffed: House) -> None:
    order = staffed.stop("everything")
    question = resume.ask(staffed.parts.desk, "req_1", [order], 0)
    given = votes(staffed, question, "olga", "omar")
    staffed.stop("tenant:other")
    with pytest.raises(Conflict) as refused:
        resume.order(staffed.parts.desk, staffed.parts.signers.grant, question, given, 0)
    assert refused.value.code == "conflict.head"


def test_refuses_when_an_approval_is_over_other_stops(staffed: House) -> None:
    order = staffed.stop("everything")
    question = resume.ask(staffed.parts.desk, "req_1", [order], 0)
    given = votes(staffed, question, "olga", "omar", clears=["stop_other"])
    with pytest.raises(Untrusted):
        resume.order(staffed.parts.desk, staffed.parts.signers.grant, question, given, 0)


def test_refuses_when_the_cool_down_has_not_passed(staffed: House) -> None:
    order = staffed.stop("everything")
    with pytest.raises(Unavailable) as refused:
        resume.ask(staffed.parts.desk, "req_1", [order], 60_000)
    assert refused.value.code == "unavailable.cooldown"


def test_refuses_when_two_resumes_want_one_epoch(staffed: House) -> None:
    """Put-if-absent: the epoch is a key of the order log."""
    log = staffed.parts.desk.log
    made = lift(staffed, staffed.stop("everything"))
    signed = next(e.signed for e in log.entries() if e.id == made.id)
    body = {**signed.body(), "id": "resume_other"}
    with pytest.raises(Conflict) as refused:
        log.append(sign(RESUME, body, staffed.parts.signers.grant))
    assert refused.value.code == "conflict.epoch"
    assert log.append(signed).id == made.id


def test_G9_stopped_needs_every_node_of_the_order_logs_list(staffed: House) -> None:
    """A node that joined after the backup is not in the restored database, and still must answer."""
    first = staffed.host("n1")
    copy = backup(staffed)
    second = staffed.host("n2")
    restore(staffed, copy)
    staffed.parts.desk.catch_up()
    first.parts = second.parts = staffed.parts
    order = staffed.stop("everything")
    with reading(staffed.parts.engine) as connection:
        assert [n.id for n in nodes.every(connection)] == ["n1"]
    first.beat(receipts=[first.receipt(order).as_json()])
    assert _state(staffed, order) == "pending"
    second.beat(receipts=[second.receipt(order).as_json()])
    assert _state(staffed, order) == "confirmed"


def test_G9_a_stop_of_one_run_waits_for_the_nodes_that_ever_held_it(staffed: House) -> None:
    host = staffed.host("n1")
    run = live(staffed, host)
    staffed.host("n2")
    order = staffed.stop(f"run:{run}")
    with reading(staffed.parts.engine) as connection:
        found = proof.report(staffed.parts.desk, connection, order, silent_ms=5000, unconfirmed_ms=5000)
    assert [n["node"] for n in found["nodes"]] == ["n1"]
    host.beat(receipts=[host.receipt(order).as_json()])
    assert _state(staffed, order) == "confirmed"


def _state(house: House, order: str, unconfirmed_ms: int = 5000, silent_ms: int = 5000) -> str:
    with reading(house.parts.engine) as connection:
        return str(proof.report(house.parts.desk, connection, order, silent_ms=silent_ms,
                                unconfirmed_ms=unconfirmed_ms)["state"])


def test_refuses_a_receipt_that_the_supervisor_did_not_sign(staffed: House) -> None:
    first, second = staffed.host("n1"), staffed.host("n2")
    order = staffed.stop("everything")
    forged = second.receipt(order)
    body = {**forged.body(), "node": "n1"}
    answer = first.beat(receipts=[sign(RECEIPT, body, second.supervisor).as_json()])
    assert answer["receipts_acked"] == []
    answer = first.beat(receipts=[first.receipt(order).as_json()])
    assert answer["receipts_acked"] == [order]
    assert _state(staffed, order) == "pending"  # n2 is missing


def test_never_stopped_without_proof(staffed: House) -> None:
    """Silence is unreachable, a survivor is not confirmed; a later proof replaces an earlier failure."""
    host = staffed.host()
    order = staffed.stop("everything")
    assert _state(staffed, order, unconfirmed_ms=0, silent_ms=0) == "unreachable"
    assert _state(staffed, order, unconfirmed_ms=0, silent_ms=60_000) == "not_confirmed"
    survivors = [{"pid": 7, "state": "D", "wchan": "x"}]
    host.beat(receipts=[host.receipt(order, "not_confirmed", 5, survivors=survivors).as_json()])
    assert _state(staffed, order) == "not_confirmed"
    host.beat(receipts=[host.receipt(order, "confirmed", 9).as_json()])
    host.beat(receipts=[host.receipt(order, "not_confirmed", 5).as_json()])  # late on another path
    assert _state(staffed, order) == "confirmed"


def test_G10_a_local_stop_goes_up_and_a_resume_can_name_it(staffed: House) -> None:
    host, other = staffed.host("n1"), staffed.host("n2")
    local = host.local_stop("node:n1")
    answer = host.beat(orders=[local.as_json()])
    order = local.body()["id"]
    assert answer["acked"] == [order]
    assert [s.id for s in standing(staffed).active] == [order]
    pushed = next(s for _, s in staffed.parts.desk.feed(0)[0])
    assert verify(pushed, STOP, staffed.parts.signers.stop_pins)["id"] == order  # countersigned for other nodes
    lift(staffed, order)
    assert standing(staffed).active == []
    assert other


def test_G10_refuses_a_local_stop_that_reaches_further(staffed: House) -> None:
    host = staffed.host("n1")
    staffed.host("n2")
    far = host.local_stop("node:n2")
    assert host.beat(orders=[far.as_json()])["acked"] == []
    assert standing(staffed).active == []
    near = host.local_stop("node:n1")
    assert host.beat(orders=[near.as_json()])["acked"] == [near.body()["id"]]


def test_a_stop_is_accepted_with_the_ledger_down(staffed: House) -> None:
    def down(_: object, __: object = None) -> None:
        raise Unavailable("ledger away")

    staffed.parts.desk._record = down
    order = staffed.stop("everything")
    assert [s.id for s in standing(staffed).active] == [order]
    staffed.parts.desk.record_late()
    assert staffed.parts.desk.unrecorded() == 1
    staffed.parts.desk._record = staffed.parts.ledger.record
    staffed.parts.desk.record_late()
    assert staffed.parts.desk.unrecorded() == 0


def test_H4_a_stop_asks_neither_bundle_nor_gate(staffed: House) -> None:
    staffed.parts.slot._active = None

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the gate is gone")

    staffed.parts.gate.ask = broken  # type: ignore[method-assign]
    assert staffed.stop("everything")


def test_refuses_when_a_researcher_stops_what_is_not_his(staffed: House) -> None:
    staffed.host()
    run = staffed.launch()
    answer = staffed.post("/api/stop", staffed.people["ada"], {"scope": f"run:{run}", "reason": ""})
    assert answer.json()["error"]["code"] == "denied.stop"
    assert staffed.stop(f"run:{run}", "rob")  # positive control: the owner
    assert staffed.post("/api/stop", staffed.people["rob"], {"scope": "everything"}).status_code == 403


def test_refuses_a_lease_for_a_grant_that_never_went_live(staffed: House, monkeypatch: pytest.MonkeyPatch) -> None:
    host = staffed.host()
    run, alive = staffed.launch(), live(staffed, host)
    later = now_us() + 61_000_000
    monkeypatch.setattr(issuer, "now_us", lambda: later)
    assert host.beat((run, 1))["refused"][0]["code"] == "conflict.grant_expired"
    assert len(host.beat((alive, 1))["leases"]) == 1


def test_refuses_a_lease_for_another_nodes_run(staffed: House) -> None:
    host = staffed.host("n1")
    run = live(staffed, host)
    other = staffed.host("n2")
    with pytest.raises(Denied) as refused:
        other.beat((run, 1))
    assert refused.value.code == "denied.node"


def test_refuses_a_lease_when_the_owner_is_disabled(staffed: House) -> None:
    host = staffed.host()
    run = live(staffed, host)
    with writing(staffed.parts.engine) as connection:
        people.set_disabled(connection, staffed.people["rob"].id, True)
    assert host.beat((run, 1))["refused"][0]["code"] == "denied.owner"


def test_the_snapshot_of_stops_names_all_sets(staffed: House) -> None:
    host = staffed.host()
    first = staffed.stop("tenant:a")
    lift(staffed, first)
    second = staffed.stop("tenant:b")
    body = verify(Signed.from_json(host.beat()["stops"]), STOPS, staffed.parts.signers.stop_pins)
    assert body["cleared"] == [first]
    assert [Signed.from_json(o).body()["id"] for o in body["orders"]] == [second]
    assert body["epoch"] == 3
    level = staffed.parts.desk.digest(standing(staffed))
    assert host.beat(digest=level)["orders"] == []
    assert len(host.beat(digest="")["orders"]) == 2


def test_trust_grows_to_two_officers_and_stays(house: House) -> None:
    house.person("olga", "safety_officer")
    host = house.host()
    assert host.beat(trust_version=2)["trust"] is None
    house.person("omar", "safety_officer")
    body = verify(Signed.from_json(host.beat(trust_version=2)["trust"]), TRUST, house.parts.signers.grant_pins)
    assert (body["version"], len(body["persons"]), body["node"], body["threshold"]) == (3, 2, "n1", 2)
    house.person("oona", "safety_officer")
    assert host.beat(trust_version=3)["trust"] is None


def test_a_torn_line_of_the_accepted_list_counts_for_nothing(tmp_path: Path, staffed: House) -> None:
    staffed.stop("everything")
    source = staffed.parts.settings.places.control / "accepted.log"
    copy = tmp_path / "accepted.log"
    copy.write_bytes(source.read_bytes() + b'{"format":"interl')
    held = AcceptedList(copy)
    assert len(held.orders()) == 1
    more = staffed.stop("tenant:x")
    held.append(next(s for _, s in staffed.parts.desk.feed(0)[0] if s.body()["id"] == more))
    assert len(AcceptedList(copy).orders()) == 2


def test_refuses_when_the_order_log_vanished(tmp_path: Path) -> None:
    log = OrderLog(tmp_path / "orders")
    with pytest.raises(Unavailable) as refused:
        log.entries()
    assert refused.value.code == "unavailable.order_log"
    log.create()
    assert log.entries() == []


def test_refuses_a_second_join_under_one_id(staffed: House) -> None:
    staffed.host("n1")
    with pytest.raises(Conflict) as refused:
        staffed.host("n1")
    assert refused.value.code == "conflict.node"


def test_launch_orders_carry_epoch_and_facts(staffed: House) -> None:
    staffed.host()
    run = staffed.launch()
    with reading(staffed.parts.engine) as connection:
        row = runs.attempt(connection, run, 1)
    assert row is not None
    body = verify(Signed.from_json(json.loads(row.launch)), GRANT, staffed.parts.signers.grant_pins)
    assert body["facts"]["roles"] == ["researcher"]
    assert body["labels"]["node"] == "n1"
    assert body["epoch"] == 0
