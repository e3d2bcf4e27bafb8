"""Runs that failed start again by themselves: what counts as failed, who may, how often, and never twice."""

import base64
import json
from typing import Any

import pytest

from control_plane import restarts
from control_plane.lifecycle import Report, take
from control_plane.scheduler import choose
from control_plane.store import checkpoints, nodes, people, runs
from control_plane.store.db import now_us, reading, writing
from interlock.call import new_id
from interlock.event import Event, EventType
from tests.control_plane.conftest import FACTS, House
from tests.control_plane.test_orders import lift

FAULT: dict[str, Any] = {"exit": 1, "signal": None, "result": "confirmed", "why": "ended"}


def failing(house: House, outcome: dict[str, Any] | None = None, **plan: Any) -> str:
    """A run whose first attempt ended as `outcome` says."""
    run = house.launch(**{"restarts": 2, "resume": True, **plan})
    end(house, run, 1, outcome or FAULT)
    return run


def end(house: House, run: str, attempt: int, outcome: dict[str, Any] = FAULT) -> None:
    with writing(house.parts.engine) as connection:
        take(connection, "n1", run, attempt, Report.from_json({"state": "ended", "outcome": outcome}))


def row_of(house: House, run: str) -> Any:
    with reading(house.parts.engine) as connection:
        return runs.one(connection, run)


def events(house: House, run: str, kind: EventType) -> list[dict[str, Any]]:
    house.parts.ledger.sequence()
    return [r.event for r in house.parts.ledger.rows(limit=1000, run=run, type=kind.value)]


def test_a_failed_run_gets_its_next_attempt_once(staffed: House) -> None:
    staffed.host()
    run = failing(staffed)
    assert restarts.waits(row_of(staffed, run))
    restarts.turn(staffed.parts, {})
    restarts.turn(staffed.parts, {})
    row = row_of(staffed, run)
    assert (row.state, row.attempt) == ("placed", 2)
    (told,) = events(staffed, run, EventType.RUN_RESTARTED)
    assert told["facts"]["attempt"] == 2
    assert told["facts"]["after"] == {"exit": 1}
    asked = [e for e in events(staffed, run, EventType.CALL_DECIDED) if e["facts"]["call"]["action"] == "restart"]
    assert [e["facts"]["facts"]["mfa_age_ms"] for e in asked] == [None]
    assert asked[0]["actor"] == staffed.people["rob"].id


@pytest.mark.parametrize(("outcome", "again"), [
    (FAULT, True), ({**FAULT, "exit": None, "signal": 9}, True),
    ({**FAULT, "exit": 0}, False), ({**FAULT, "exit": None}, False), ({**FAULT, "why": "lease"}, False),
    ({**FAULT, "why": "order:stop_1"}, False), ({**FAULT, "why": "node_restarted"}, False),
    ({**FAULT, "result": "not_confirmed"}, False)])
def test_only_what_failed_by_itself_and_provably(staffed: House, outcome: dict[str, Any], again: bool) -> None:
    staffed.host()
    run = failing(staffed, outcome)
    restarts.turn(staffed.parts, {})
    assert (row_of(staffed, run).attempt == 2) is again
    assert restarts.failed(outcome) is again  # by itself too, whatever state the report led to


def test_refuses_a_plan_that_does_not_ask_for_it(staffed: House) -> None:
    staffed.host()
    quiet, asking = failing(staffed, resume=False), failing(staffed)
    restarts.turn(staffed.parts, {})
    assert (row_of(staffed, quiet).attempt, row_of(staffed, asking).attempt) == (1, 2)


def test_refuses_beyond_the_budget_and_says_so(staffed: House) -> None:
    staffed.host()
    run = failing(staffed, restarts=1)
    restarts.turn(staffed.parts, {})
    end(staffed, run, 2)
    restarts.turn(staffed.parts, {})
    row = row_of(staffed, run)
    assert (row.state, row.attempt, json.loads(row.outcome)["not_restarted"]) == ("ended", 2, "conflict.restarts")
    assert not restarts.waits(row)
    restarts.turn(staffed.parts, {})
    assert [e["facts"]["code"] for e in events(staffed, run, EventType.RUN_REFUSED)] == ["conflict.restarts"]


def test_refuses_an_expired_plan(staffed: House) -> None:
    staffed.host()
    run, other = failing(staffed), failing(staffed)
    with writing(staffed.parts.engine) as connection:
        connection.exec_driver_sql(f"UPDATE runs SET created_us = created_us - 86500000000 WHERE id = '{run}'")
    restarts.turn(staffed.parts, {})
    assert json.loads(row_of(staffed, run).outcome)["not_restarted"] == "conflict.plan_expired"
    assert row_of(staffed, other).attempt == 2


def test_refuses_while_stopped_and_stays_ended_after_the_resume(staffed: House) -> None:
    staffed.host()
    run, other = failing(staffed), failing(staffed)
    order = staffed.stop(f"run:{run}")
    restarts.turn(staffed.parts, {})
    lift(staffed, order)
    restarts.turn(staffed.parts, {})
    assert json.loads(row_of(staffed, run).outcome)["not_restarted"].startswith("stopped")
    assert (row_of(staffed, run).attempt, row_of(staffed, other).attempt) == (1, 2)


def test_refuses_when_the_owner_is_disabled_or_lost_the_role(staffed: House) -> None:
    staffed.host()
    rob, ray = staffed.people["rob"], staffed.person("ray", "researcher")
    run, other = failing(staffed), staffed.launch(ray, restarts=2, resume=True)
    end(staffed, other, 1)
    with writing(staffed.parts.engine) as connection:
        people.set_disabled(connection, rob.id, True)
        people.set_roles(connection, ray.id, "lab", frozenset())
    restarts.turn(staffed.parts, {})
    assert json.loads(row_of(staffed, run).outcome)["not_restarted"] == "denied.owner"
    assert json.loads(row_of(staffed, other).outcome)["not_restarted"] == "denied.no_match"
    with writing(staffed.parts.engine) as connection:
        people.set_disabled(connection, rob.id, False)
    control = failing(staffed)
    restarts.turn(staffed.parts, {})
    assert row_of(staffed, control).attempt == 2


def test_refuses_when_the_api_key_was_revoked(staffed: House) -> None:
    staffed.host()
    minted = staffed.post("/api/keys", staffed.people["rob"], {
        "name": "ci", "scopes": ["launch", "look"], "days": 1}).json()
    plan = {"argv": ["true"], "tier": "none", "tenant": "lab", "restarts": 2, "resume": True}
    made = [staffed.client.post("/api/runs", json={"plan": plan},
                                headers={"authorization": f"Bearer {minted['key']}"}).json()["run"] for _ in range(2)]
    end(staffed, made[0], 1)
    restarts.turn(staffed.parts, {})
    assert row_of(staffed, made[0]).attempt == 2
    staffed.client.delete(f"/api/keys/{minted['id']}", headers=staffed.people["rob"].headers)
    end(staffed, made[1], 1)
    restarts.turn(staffed.parts, {})
    assert json.loads(row_of(staffed, made[1]).outcome)["not_restarted"] == "denied.api_key"


def test_what_may_pass_is_asked_again_for_a_while(staffed: House) -> None:
    staffed.host()
    run = failing(staffed)
    with writing(staffed.parts.engine) as connection:
        connection.exec_driver_sql("UPDATE nodes SET seen_us = seen_us - 60000000")
    restarts.turn(staffed.parts, {})
    assert restarts.waits(row_of(staffed, run))
    with writing(staffed.parts.engine) as connection:
        connection.exec_driver_sql("UPDATE runs SET ended_us = ended_us - 40000000")
    restarts.turn(staffed.parts, {})
    assert json.loads(row_of(staffed, run).outcome)["not_restarted"] == "unavailable.node"


def test_nothing_starts_while_the_ledger_signs_no_head(staffed: House) -> None:
    staffed.host()
    run = failing(staffed)
    restarts.turn(staffed.parts, {"tree": "conflict.ledger"})
    assert row_of(staffed, run).attempt == 1
    restarts.turn(staffed.parts, {})
    assert row_of(staffed, run).attempt == 2


def test_refuses_to_place_what_moved_meanwhile(staffed: House) -> None:
    """Two that try at once make one attempt: the second finds the run moved, in its own transaction."""
    staffed.host()
    run = failing(staffed)
    before = row_of(staffed, run)
    assert restarts.start(staffed.parts, before) == 2
    end(staffed, run, 2, {**FAULT, "exit": 5})
    with pytest.raises(restarts.Conflict) as refusal:
        restarts.start(staffed.parts, before)
    assert refusal.value.code == "conflict.restarted"
    assert restarts.start(staffed.parts, row_of(staffed, run)) == 3


def test_the_output_goes_on_with_the_next_attempt(staffed: House) -> None:
    staffed.host()
    rob, run = staffed.people["rob"], failing(staffed)
    keep = staffed.parts.output

    def told(after: int, attempt: int) -> dict[str, Any]:
        return dict(staffed.get(f"/api/runs/{run}/output?after={after}&attempt={attempt}", rob).json())

    plan = restarts.Plan.from_json(json.loads(row_of(staffed, run).plan))
    keep.append(run, 1, 0, b"first", plan)
    first = told(0, 1)
    assert (base64.b64decode(first["data"]), first["ended"], first["attempt"]) == (b"first", False, 1)
    assert not told(5, 1)["ended"]  # it waits for its restart
    restarts.turn(staffed.parts, {})
    keep.append(run, 2, 0, b"second", plan)
    assert told(5, 1) | {"outcome": None} == {
        "data": "", "next": 5, "ended": False, "state": "placed", "attempt": 2, "outcome": None}
    assert base64.b64decode(told(0, 2)["data"]) == b"second"
    end(staffed, run, 2, {**FAULT, "exit": 0})
    assert told(6, 2)["ended"]
    assert base64.b64decode(told(0, 1)["data"]) == b"first"


def test_progress_shows_steps_and_checkpoints_to_who_may_look(staffed: House) -> None:
    staffed.host()
    run, rob = staffed.launch(), staffed.people["rob"]
    with writing(staffed.parts.engine) as connection:
        for n in (1, 2):
            staffed.parts.ledger.record(Event(EventType.RUN_STEP, "x", "lab", run, facts={
                "attempt": 1, "n": n, "steps": 1, "metrics": {"loss_micro": 9 - n}}), connection)
        checkpoints.add(connection, digest="sha256:" + "0" * 64, run=run, step=2, attempt=1, kind="state", items=3,
                        bytes=70, parent="", node="n1", manifest=b"m", committed_us=now_us())
    found = staffed.get(f"/api/runs/{run}/progress", rob).json()
    assert [(p["n"], p["metrics"]) for p in found["points"]] == [(1, {"loss_micro": 8}), (2, {"loss_micro": 7})]
    assert [(c["step"], c["kind"], c["items"]) for c in found["checkpoints"]] == [(2, "state", 3)]
    eve = staffed.person("eve", "researcher")
    assert staffed.get(f"/api/runs/{run}/progress", eve).status_code == 404
    assert staffed.get(f"/api/runs/{new_id('run')}/progress", rob).status_code == 404


def test_refuses_plans_that_no_node_could_carry_out(staffed: House) -> None:
    """What no node offers is said before people are asked: an environment, a gateway, ranks that can meet."""
    staffed.host()

    def chosen(**more: Any) -> str:
        plan = restarts.Plan.from_json({"argv": ["x"], "tier": "none", "tenant": "lab", **more})
        with reading(staffed.parts.engine) as connection:
            return choose(connection, plan)

    engine = {"serve": True, "guest": True, "model": "m", "weights": ["sha256:" + "0" * 64], "environment": "guest"}
    assert [chosen(environment="guest"), chosen(ranks=2), chosen(**engine)] == ["n1"] * 3
    with writing(staffed.parts.engine) as connection:
        nodes.set_facts(connection, "n1", {**FACTS, "gateway": False}, now_us())
    for more, code in (({"environment": "other"}, "not_found.environment"), (engine, "unavailable.gateway"),
                       ({"ranks": 2, "tier": "high"}, "denied.profile")):
        with pytest.raises(restarts.Refusal) as refusal:
            chosen(**more)
        assert refusal.value.code == code
        assert refusal.value.next_step
