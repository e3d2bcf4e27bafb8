"""POST /api/runs and what follows: refusals one per kind, approvals, restarts, why, status."""

import base64
import json
from typing import Any

import pytest
from fastapi.routing import APIRoute

from audit.verify import verify
from control_plane.api import context
from control_plane.auth import approvals
from control_plane.auth.sessions import hash_of
from control_plane.store import nodes, people, runs
from control_plane.store.db import now_us, reading, writing
from control_plane.store.sessions import Proof, add_proof
from control_plane.ticker import sequence
from interlock.call import new_id
from interlock.canon import digest_bytes
from interlock.event import Event, EventType
from interlock.order import Plan
from policy import bundle
from tests.control_plane.conftest import FACTS, ROOT, House, Human
from tests.control_plane.test_orders import lift


def plan(**more: Any) -> dict[str, Any]:
    return {"argv": ["true"], "tier": "none", "tenant": "lab", **more}


def ask(house: House, who: Human, **body: Any) -> Any:
    return house.post("/api/runs", who, {"plan": plan(), **body})


def code_of(answer: Any) -> str:
    return str(answer.json()["error"]["code"])


def proof(house: House, who: Human, wanted: dict[str, Any], action: str = "launch") -> str:
    """A second-factor proof as /api/step-up leaves it behind."""
    made = Proof(new_id("stp"), hash_of(who.session), action, Plan.from_json(wanted).digest(), now_us(), 0)
    with writing(house.parts.engine) as connection:
        add_proof(connection, made)
    return made.id


def approve(house: House, request: str, *names: str) -> None:
    with writing(house.parts.engine) as connection:
        for name in names:
            person = people.by_id(connection, house.people[name].id)
            assert person is not None
            approvals.vote(connection, approvals.found(connection, request), person, approve=True)


def test_places_a_run_for_a_researcher(staffed: House) -> None:
    staffed.host()
    answer = ask(staffed, staffed.people["rob"])
    assert answer.status_code == 201, answer.text
    assert (answer.json()["state"], answer.json()["node"]) == ("placed", "n1")
    assert [r["run"] for r in staffed.get("/api/runs", staffed.people["rob"]).json()["runs"]] == [answer.json()["run"]]


def test_refuses_without_the_role(staffed: House) -> None:
    staffed.host()
    assert code_of(ask(staffed, staffed.people["ada"])) == "denied.no_match"
    assert ask(staffed, staffed.people["rob"]).status_code == 201


def test_refuses_an_unknown_tier_and_unknown_fields(staffed: House) -> None:
    staffed.host()
    rob = staffed.people["rob"]
    assert code_of(staffed.post("/api/runs", rob, {"plan": plan(tier="huge")})) == "malformed.tier"
    assert staffed.post("/api/runs", rob, {"plan": plan(), "roles": ["administrator"]}).status_code == 422
    assert staffed.post("/api/runs", rob, {"plan": plan(root=True)}).status_code == 422


def test_refuses_another_tenant(staffed: House) -> None:
    staffed.host()
    refused = staffed.post("/api/runs", staffed.people["rob"], {"plan": plan(tenant="other")})
    assert code_of(refused) == "denied.no_match"


def test_refuses_high_without_a_fresh_factor(staffed: House) -> None:
    staffed.host()
    rob, wanted = staffed.people["rob"], plan(tier="high")
    with writing(staffed.parts.engine) as connection:  # the sign-in's own factor is old
        connection.exec_driver_sql("UPDATE sessions SET created_us = created_us - 400000000")
    assert code_of(staffed.post("/api/runs", rob, {"plan": wanted})) == "step_up_required"
    step = proof(staffed, rob, wanted)
    assert staffed.post("/api/runs", rob, {"plan": wanted, "step_up": step}).status_code == 201
    assert code_of(staffed.post("/api/runs", rob, {"plan": wanted, "step_up": step})) == "step_up_required"  # used


def test_critical_needs_two_other_persons_for_exactly_this_plan(staffed: House) -> None:
    staffed.host()
    rob, wanted = staffed.people["rob"], plan(tier="critical", argv=["sleep", "9"])
    first = staffed.post("/api/runs", rob, {"plan": wanted, "step_up": proof(staffed, rob, wanted)})
    assert code_of(first) == "approval_required"
    request, details = first.json()["error"]["details"]["request"], first.json()["error"]["details"]
    assert (details["needed"], details["given"]) == (2, 0)
    approve(staffed, request, "olga")
    body = {"plan": wanted, "approval": request}
    one = staffed.post("/api/runs", rob, {**body, "step_up": proof(staffed, rob, wanted)})
    assert code_of(one) == "approval_required"
    assert one.json()["error"]["details"]["request"] == request
    approve(staffed, request, "omar")
    other = plan(tier="critical", argv=["sleep", "99"])
    changed = staffed.post("/api/runs", rob, {**body, "plan": other, "step_up": proof(staffed, rob, other)})
    assert code_of(changed) == "approval_required"  # a byte outside the plan needs a new approval
    good = staffed.post("/api/runs", rob, {**body, "step_up": proof(staffed, rob, wanted)})
    assert good.status_code == 201, good.text
    with reading(staffed.parts.engine) as connection:
        row = runs.attempt(connection, good.json()["run"], 1)
    assert row is not None
    facts = json.loads(base64.b64decode(json.loads(row.launch)["payload"]))["facts"]
    assert sorted(facts["approvals"]) == sorted(staffed.people[n].id for n in ("olga", "omar"))
    again = staffed.post("/api/runs", rob, {**body, "step_up": proof(staffed, rob, wanted)})
    assert code_of(again) == "conflict.approval_used"


def test_refuses_when_no_node_or_no_layer_is_there(staffed: House) -> None:
    rob = staffed.people["rob"]
    assert code_of(ask(staffed, rob)) == "unavailable.node"
    staffed.host()
    with writing(staffed.parts.engine) as connection:
        nodes.set_facts(connection, "n1", {**FACTS, "tiers": ["none"]}, now_us())
    wanted = plan(tier="high")
    refused = staffed.post("/api/runs", rob, {"plan": wanted, "step_up": proof(staffed, rob, wanted)})
    assert code_of(refused) == "layer_missing.tier"
    assert ask(staffed, rob).status_code == 201


def test_refuses_code_that_was_never_uploaded(staffed: House) -> None:
    staffed.host()
    rob = staffed.people["rob"]
    wanted = plan(code=[{"name": "a.py", "digest": digest_bytes(b"print(1)")}])
    assert code_of(staffed.post("/api/runs", rob, {"plan": wanted})) == "not_found.code"
    stored = staffed.client.post("/api/code", content=b"print(1)", headers=rob.headers)
    assert stored.json()["digest"] == digest_bytes(b"print(1)")
    assert staffed.post("/api/runs", rob, {"plan": wanted}).status_code == 201


def test_refuses_when_stopped_and_resumes_only_by_two(staffed: House) -> None:
    staffed.host()
    rob = staffed.people["rob"]
    order = staffed.stop("everything")
    assert code_of(ask(staffed, rob)).startswith("stopped")
    cora = staffed.people["cora"]
    asked = staffed.post("/api/resumes", cora, {"clears": [order], "reason": "over"}).json()
    assert asked["needed"] == 2
    assert asked["body"]["clears"] == [order]
    for name in ("olga", "omar"):
        assert code_of(ask(staffed, rob)).startswith("stopped")
        with writing(staffed.parts.engine) as connection:
            person = people.by_id(connection, staffed.people[name].id)
            assert person is not None
            now = approvals.vote(connection, approvals.found(connection, asked["request"]), person, approve=True,
                                 signed=staffed.approval(asked, staffed.people[name]), head=asked["head"])
    effect = staffed.client.app.state.approved(now)  # what the approve route calls
    assert effect["clears"] == [order]
    assert ask(staffed, rob).status_code == 201
    assert staffed.get(f"/api/stops/{order}", cora).json()["cleared_by"] == effect["resume"]


def test_restart_stays_inside_the_budget_and_is_refused_while_stopped(staffed: House) -> None:
    host = staffed.host()
    rob = staffed.people["rob"]
    run = staffed.launch(restarts=1)
    assert code_of(staffed.post(f"/api/runs/{run}/restart", rob, {})) == "conflict.run_open"
    assert len(host.beat((run, 1))["leases"]) == 1
    with writing(staffed.parts.engine) as connection:
        runs.set_state(connection, run, 1, "ended", now_us(), {"exit": 1})
    order = staffed.stop(f"run:{run}")
    assert code_of(staffed.post(f"/api/runs/{run}/restart", rob, {})) == "stopped.order"
    lift(staffed, order)
    second = staffed.post(f"/api/runs/{run}/restart", rob, {})
    assert second.status_code == 201, second.text
    assert second.json()["attempt"] == 2
    with writing(staffed.parts.engine) as connection:
        runs.set_state(connection, run, 2, "ended", now_us(), {"exit": 1})
    assert code_of(staffed.post(f"/api/runs/{run}/restart", rob, {})) == "conflict.restarts"


def test_others_do_not_see_a_run(staffed: House) -> None:
    staffed.host()
    run = staffed.launch()
    eve = staffed.person("eve", "researcher")
    assert staffed.get(f"/api/runs/{run}", eve).status_code == 404
    assert staffed.get("/api/runs", eve).json()["runs"] == []
    assert staffed.get(f"/api/runs/{run}", staffed.people["rob"]).status_code == 200
    assert staffed.get(f"/api/runs/{run}", staffed.people["olga"]).status_code == 200


def test_why_names_rule_bundle_and_what_would_change_it(staffed: House) -> None:
    staffed.host()
    refused = ask(staffed, staffed.people["ada"]).json()["error"]
    found = staffed.get(f"/api/why/{refused['details']['call']}", staffed.people["ada"]).json()
    assert found["decisions"][0]["code"] == "no_match"
    assert found["decisions"][0]["changes"]
    run = staffed.launch()
    found = staffed.get(f"/api/why/{run}", staffed.people["rob"]).json()
    assert found["decisions"][0]["effect"] == "allow"
    assert found["decisions"][0]["rules"]
    assert staffed.get(f"/api/why/{run}", staffed.people["ada"]).status_code in (200, 404)
    assert staffed.get("/api/why/call_none", staffed.people["rob"]).status_code == 404


def test_status_is_amber_until_the_supervisor_echoes(staffed: House) -> None:
    host = staffed.host()
    rob = staffed.people["rob"]
    found = staffed.get("/api/status", rob).json()
    assert (found["state"], found["armed"], found["grants"]["ok"]) == ("ready", False, True)
    host.beat(digest=staffed.parts.desk.digest(staffed.parts.desk.standing_now()))
    assert staffed.get("/api/status", rob).json()["armed"] is True
    assert staffed.client.get("/api/status").status_code == 401
    assert staffed.client.get("/healthz").status_code == 200


def test_export_verifies_offline(staffed: House, tmp_path: Any) -> None:
    staffed.host()
    staffed.launch()
    assert staffed.client.post("/api/audit/exports", headers=staffed.people["rob"].headers).status_code == 403
    answer = staffed.client.post("/api/audit/exports", headers=staffed.people["olga"].headers)
    assert answer.status_code == 200, answer.text
    path = tmp_path / "export.zip"
    path.write_bytes(answer.content)
    vkey = (staffed.state / "trust" / "ledger.vkey").read_text()
    assert verify(path, vkey).status == "ok"
    changed = bytearray(answer.content)
    changed[len(changed) // 2] ^= 1
    path.write_bytes(bytes(changed))
    assert verify(path, vkey).status != "ok"


def test_bundles_are_refused_unsigned_and_the_old_one_decides(staffed: House) -> None:
    staffed.host()
    unsigned = base64.b64encode(bundle.pack(ROOT / "examples" / "policy", version=9)).decode()
    ada = staffed.people["ada"]
    assert code_of(staffed.post("/api/policy/bundles", ada, {"archive": unsigned})).startswith("untrusted")
    assert staffed.get("/api/policy", ada).json()["active"]["version"] == 1
    assert ask(staffed, staffed.people["rob"]).status_code == 201


@pytest.mark.parametrize("path", ["/api/runs", "/api/stops", "/api/nodes", "/api/status", "/api/policy",
                                  "/api/audit/head", "/api/audit/records", "/api/why/x"])
def test_nobody_looks_without_signing_in(house: House, path: str) -> None:
    assert house.client.get(path).status_code == 401


def test_every_route_has_an_action(house: House) -> None:
    app = house.client.app
    missing = [(m, r.path) for r in app.routes if isinstance(r, APIRoute) for m in r.methods
               if (m, r.path) not in context.declared()]
    assert not missing


def test_answers_carry_the_headers_and_refuse_strange_hosts(house: House) -> None:
    answer = house.client.get("/healthz")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert house.client.get("/healthz", headers={"host": "evil.example"}).status_code == 400
    large = house.client.post("/api/code", content=b"x" * (17 << 20))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "malformed.size")


@pytest.mark.parametrize("odd", ["aurora ", "a\nb", "\u202eevil", "../x", "x" * 129])
def test_refuses_a_model_that_looks_like_another(staffed: House, odd: str) -> None:
    staffed.host()
    assert code_of(ask(staffed, staffed.people["rob"], plan=plan(model=odd))) == "malformed.model"
    assert ask(staffed, staffed.people["rob"], plan=plan(model="meta/Llama-3.1:8b")).status_code == 201


def test_refuses_a_plan_that_makes_the_gates_ask_without_end(staffed: House) -> None:
    staffed.host()
    many = [{"name": f"d{n}", "path": f"/srv/{n}"} for n in range(65)]
    sequence(staffed.parts)
    before = staffed.parts.ledger.head().size
    assert code_of(ask(staffed, staffed.people["rob"], plan=plan(datasets=many))) == "malformed.plan"
    sequence(staffed.parts)
    assert staffed.parts.ledger.head().size == before
    code = [{"name": f"c{n}", "digest": "sha256:" + "0" * 64} for n in range(257)]
    assert code_of(ask(staffed, staffed.people["rob"], plan=plan(code=code))) == "malformed.plan"
    assert ask(staffed, staffed.people["rob"], plan=plan(datasets=many[:2])).status_code == 201


def test_why_tells_of_restarts_and_keys_however_long_a_run_trains(staffed: House) -> None:
    staffed.host()
    run = staffed.launch(restarts=2)
    steps = [Event(EventType.RUN_STEP, "node/n1", "lab", run, facts={"n": n}) for n in range(1001)]
    with writing(staffed.parts.engine) as connection:
        for step in steps:
            staffed.parts.ledger.record(step, connection)
        staffed.parts.ledger.record(Event(EventType.RUN_KEY_REFUSED, "node/n1", "lab", run), connection)
        runs.set_state(connection, run, 1, "ended", now_us(), {"exit": 1})
    sequence(staffed.parts)
    assert staffed.post(f"/api/runs/{run}/restart", staffed.people["rob"], {}).status_code == 201
    told = staffed.get(f"/api/why/{run}", staffed.people["rob"]).json()
    assert [(e["type"], e["actor"]) for e in told["events"]] == [
        ("run.granted", staffed.people["rob"].id), ("key.refused", "node/n1"),
        ("run.restarted", staffed.people["rob"].id)]
    assert [d["action"] for d in told["decisions"]] == ["launch", "restart"]
    points = staffed.get(f"/api/runs/{run}/progress", staffed.people["rob"]).json()["points"]
    assert [p["n"] for p in points] == list(range(1001))
