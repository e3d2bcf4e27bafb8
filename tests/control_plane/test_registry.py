"""The registry: tiers, lineage, approval of a version, serving, retiring. Each refusal beside what is allowed."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pyotp
import pytest
from sqlalchemy import insert, select, update

from audit.spool import Spool, unshipped
from control_plane import app as joint
from control_plane import engines, registry, restarts
from control_plane.auth import approvals, totp
from control_plane.engine_plan import engine_plan
from control_plane.store import checkpoints, people, runs
from control_plane.store import registry as rows
from control_plane.store.db import now_us, reading, writing
from control_plane.store.tables import run_keys, versions
from control_plane.ticker import sequence
from interlock.call import Action
from interlock.canon import digest_bytes
from interlock.errors import Conflict, Denied, Halted, NotFound, Unavailable
from interlock.event import Event, EventType
from interlock.order import Labels, Plan
from interlock.signed import Signed
from interlock.tier import Tier
from policy.decide import Facts
from policy.facts import NEVER_MS
from tests.control_plane.conftest import House, Human
from tests.control_plane.test_runs import approve, code_of, proof


def trained(house: House, who: Human | None = None, *, tier: str = "none", provider: str = "", step: int = 7,
            kind: str = "weights", **plan: Any) -> tuple[str, str]:
    """A run with a committed checkpoint, as a node and key custody leave them behind: (run, manifest digest)."""
    with_proof = {}
    body = {"argv": ["true"], "tier": tier, "tenant": "lab", "guest": True, **plan}
    who = who or house.people["rob"]
    if tier == "critical":
        asked = house.post("/api/runs", who, {"plan": body, "step_up": proof(house, who, body)})
        request = asked.json()["error"]["details"]["request"]
        approve(house, request, "olga", "omar")
        with_proof = {"approval": request, "step_up": proof(house, who, body)}
    answer = house.post("/api/runs", who, {"plan": body, **with_proof})
    assert answer.status_code == 201, answer.text
    run = str(answer.json()["run"])
    with writing(house.parts.engine) as connection:
        connection.execute(insert(run_keys).values(
            run=run, provider=provider or ("local" if tier == "none" else "pkcs11"), kek="kek", kek_version=1,
            wrapped=b"w", context="{}", made_us=1))
    return run, committed(house, run, step=step, kind=kind)


def committed(house: House, run: str, *, step: int, kind: str = "weights", attempt: int = 1) -> str:
    version = digest_bytes(f"{run}.{step}.{kind}.{attempt}".encode())
    with writing(house.parts.engine) as connection:
        checkpoints.add(connection, digest=version, run=run, step=step, attempt=attempt, kind=kind, items=3, bytes=4096,
                        parent="", node="n1", manifest=b"SEALED-MANIFEST", committed_us=now_us())
    return version


def register(house: House, run: str, name: str = "aurora", who: str = "rob", **body: Any) -> Any:
    return house.post(f"/api/models/{name}/versions", house.people[who], {"run": run, **body})


def approved(house: House, version: str, *officers: str) -> None:
    """Submit and approve as the routes do."""
    asked = house.post(f"/api/versions/{version}/submit", house.people["rob"], {}).json()
    approve(house, asked["request"], *(officers or ("olga",)))
    assert settle(house, asked["request"])["state"] == "approved"


def settle(house: House, request: str) -> dict[str, Any]:
    with reading(house.parts.engine) as connection:
        now = approvals.standing(connection, approvals.found(connection, request))
    return joint.approved(house.parts, now)


def state(house: House, name: str = "aurora", number: int = 1, who: str = "rob") -> str:
    found = house.get(f"/api/models/{name}", house.people[who]).json()["versions"]
    return str(next(v for v in found if v["number"] == number)["state"])


def labels(house: House, run: str, attempt: int = 1) -> Labels:
    with reading(house.parts.engine) as connection:
        row = runs.attempt(connection, run, attempt)
    assert row is not None
    return Labels.from_json(json.loads(row.labels))


def live(house: House, run: str, attempt: int = 1, word: str = "live", **outcome: Any) -> None:
    with writing(house.parts.engine) as connection:
        runs.set_state(connection, run, attempt, word, now_us(), outcome or None)


def column(house: House, version: str) -> str:
    with reading(house.parts.engine) as connection:
        return str(connection.execute(select(versions.c.state).where(versions.c.digest == version)).scalar_one())


def records(house: House, kind: str) -> list[dict[str, Any]]:
    sequence(house.parts)
    answer = house.get(f"/api/audit/records?type={kind}&limit=100", house.people["olga"])
    assert answer.status_code == 200, answer.text
    found = answer.json()["records"]
    return [r.get("event", r) for r in found]


def code_for(house: House, who: Human) -> str:
    """A code that works now: the person's authenticator is set up anew."""
    secret = totp.new_secret()
    with writing(house.parts.engine) as connection:
        connection.execute(update(people.people).where(people.people.c.id == who.id).values(
            totp_sealed=totp.seal(house.parts.kek, who.id, secret), totp_last=-1))
    return pyotp.TOTP(secret).at(int(time.time()))


@pytest.fixture
def lab(staffed: House) -> House:
    staffed.host()
    return staffed


# --- registering ------------------------------------------------------------------------------------
def test_registers_the_newest_weights_with_their_lineage(lab: House) -> None:
    run, _ = trained(lab, step=5, datasets=[{"name": "text", "path": "/srv/text"}])
    newest = committed(lab, run, step=9)
    committed(lab, run, step=11, kind="state")  # training state is no model
    answer = register(lab, run)
    assert answer.status_code == 201, answer.text
    assert answer.json() == {"version": newest, "model": "aurora", "number": 1, "tier": "none", "state": "draft"}
    shown = lab.get("/api/models/aurora", lab.people["rob"]).json()
    assert (shown["owner_name"], shown["tier"], shown["versions"][0]["step"]) == ("rob", "none", 9)
    assert shown["versions"][0]["lineage"] == {
        "parents": [], "models": [], "datasets": ["/srv/text"], "dataset_digests": {}, "code": []}
    assert "manifest" not in json.dumps(shown)
    older = register(lab, run, step=5)
    assert (older.status_code, older.json()["number"]) == (201, 2)


def test_lineage_names_data_sets_by_content_as_the_node_told(lab: House, tmp_path: Path) -> None:
    run, _ = trained(lab, step=5, datasets=[{"name": "text", "path": "/srv/text"}])
    digest = "sha256:" + "d" * 64
    facts = {"attempt": 1, "name": "text", "path": "/srv/text", "digest": digest, "files": 1, "bytes": 3}
    forged = Event(EventType.DATA_DIGESTED, "x", "lab", run, facts={**facts, "digest": "sha256:" + "e" * 64})
    lab.parts.ledger.record(forged)  # of the control plane's own stream: no node said so
    spool = Spool(tmp_path, "n1", "launcher")
    spool.record(Event(EventType.DATA_DIGESTED, "rob", "lab", run, facts=facts))
    spool.close()
    for shipment in unshipped(tmp_path):
        lab.parts.ledger.intake("n1", shipment.stream, shipment.records)
    sequence(lab.parts)
    assert register(lab, run).status_code == 201
    shown = lab.get("/api/models/aurora", lab.people["rob"]).json()
    assert shown["versions"][0]["lineage"]["dataset_digests"] == {"/srv/text": digest}


def test_refuses_what_the_node_has_not_reported(lab: House) -> None:
    run, _ = trained(lab, kind="state")
    assert code_of(register(lab, run)) == "not_found.checkpoint"
    committed(lab, run, step=8)
    assert code_of(register(lab, run, step=7)) == "not_found.checkpoint"
    assert register(lab, run, step=8).status_code == 201


def test_refuses_a_run_that_is_not_the_callers(lab: House) -> None:
    run, _ = trained(lab)
    lab.person("eve", "researcher")
    assert code_of(register(lab, run, who="eve")) == "not_found.run"
    assert code_of(register(lab, run, who="olga")) == "denied.no_match"  # sees it, and registers nothing
    assert register(lab, run).status_code == 201


def test_refuses_the_same_digest_twice(lab: House) -> None:
    run, _ = trained(lab)
    assert register(lab, run).status_code == 201
    again = register(lab, run, name="other")
    assert code_of(again) == "conflict.version"
    assert again.json()["error"]["details"]["model"] == "aurora"
    assert "aurora@1" in again.json()["error"]["message"]


def test_refuses_a_name_of_another_tenant(lab: House) -> None:
    run, _ = trained(lab)
    with writing(lab.parts.engine) as connection:
        rows.add_model(connection, "taken", tenant="elsewhere", owner=lab.people["olga"].id, tier="none", now_us=1)
    assert code_of(register(lab, run, name="taken")) == "conflict.model_name"
    assert register(lab, run, name="free").status_code == 201


@pytest.mark.parametrize("name", ["Aurora", "a@1", "../x", "-a", "a" * 65])
def test_refuses_a_name_that_is_none(lab: House, name: str) -> None:
    run, _ = trained(lab)
    assert register(lab, run, name=name.replace("/", "%2F")).status_code in (404, 422)
    assert register(lab, run, name="a.b_c-1").status_code == 201


def test_a_version_is_never_below_its_run(lab: House) -> None:
    run, _ = trained(lab, tier="high")
    assert code_of(register(lab, run, tier="none")) == "denied.tier"
    assert register(lab, run).json()["tier"] == "high"


def test_a_version_is_never_below_its_model(lab: House) -> None:
    first, _ = trained(lab, tier="high")
    assert register(lab, first).status_code == 201
    second, _ = trained(lab, provider="pkcs11")
    assert code_of(register(lab, second, tier="none")) == "denied.tier"
    assert register(lab, second).json()["tier"] == "high"
    assert register(lab, trained(lab)[0], name="plain", tier="none").json()["tier"] == "none"


def test_a_version_is_never_below_its_parents(lab: House) -> None:
    """Even where the plan slipped through: the versions are asked, not the run."""
    _, parent = trained(lab, tier="high")
    child, _ = trained(lab, provider="pkcs11")
    assert register(lab, _run_of(lab, parent), name="parent").status_code == 201
    with writing(lab.parts.engine) as connection:
        row = runs.one(connection, child)
        assert row is not None
        plan = {**json.loads(row.plan), "weights": [parent]}
        connection.execute(update(runs.runs).where(runs.runs.c.id == child).values(plan=json.dumps(plan)))
    assert code_of(register(lab, child, name="child", tier="none")) == "denied.tier"
    assert register(lab, child, name="child").json()["tier"] == "high"


def _run_of(house: House, version: str) -> str:
    with reading(house.parts.engine) as connection:
        found = checkpoints.one(connection, version)
    assert found is not None
    return str(found.run)


def test_critical_needs_a_key_that_no_local_provider_wrapped(lab: House) -> None:
    run, _ = trained(lab)
    assert code_of(register(lab, run, tier="critical")) == "denied.provider"
    assert code_of(register(lab, run, tier="high")) == "denied.provider"
    assert register(lab, run).status_code == 201
    wrapped, _ = trained(lab, provider="pkcs11")
    assert register(lab, wrapped, name="guarded", tier="critical").json()["tier"] == "critical"


def test_refuses_a_run_without_a_key(lab: House) -> None:
    run, _ = trained(lab)
    with writing(lab.parts.engine) as connection:
        connection.execute(run_keys.delete().where(run_keys.c.run == run))
    assert code_of(register(lab, run)) == "denied.provider"
    assert register(lab, trained(lab)[0]).status_code == 201


def test_an_api_key_registers_nothing(lab: House) -> None:
    run, _ = trained(lab)
    key = lab.post("/api/keys", lab.people["rob"], {"name": "k", "scopes": ["look", "infer"]}).json()["key"]
    refused = lab.client.post("/api/models/aurora/versions", json={"run": run},
                              headers={"authorization": f"Bearer {key}"})
    assert code_of(refused) == "denied.scope"
    assert register(lab, run).status_code == 201


# --- plans that load versions -----------------------------------------------------------------------
def test_a_stop_of_an_ancestor_covers_the_child_and_its_engines(lab: House) -> None:
    _, base = trained(lab)
    register(lab, _run_of(lab, base), name="base")
    middle, version = trained(lab, weights=[base])
    register(lab, middle, name="middle")
    assert labels(lab, middle).lineage == ("base",)
    child, last = trained(lab, weights=[version], model="pet")
    assert labels(lab, child).lineage == ("base", "middle")
    register(lab, child, name="leaf")
    shown = lab.get("/api/models/leaf", lab.people["rob"]).json()["versions"][0]["lineage"]
    assert (shown["parents"], shown["models"]) == ([version], ["base", "middle", "pet"])
    approved(lab, last)
    engine = lab.post(f"/api/versions/{last}/serve", lab.people["rob"], {}).json()["run"]
    assert labels(lab, engine).lineage == ("base", "leaf", "middle", "pet")
    assert (labels(lab, engine).model, labels(lab, engine).tier) == ("leaf", Tier.NONE)
    lab.stop("model:base")
    refused = lab.post("/api/runs", lab.people["rob"], {"plan": {
        "argv": ["true"], "tier": "none", "tenant": "lab", "guest": True, "weights": [last]}})
    assert refused.status_code == 423
    assert lab.post("/api/runs", lab.people["rob"], {"plan": {
        "argv": ["true"], "tier": "none", "tenant": "lab"}}).status_code == 201


def load(house: House, version: str, who: Human | None = None, **plan: Any) -> Any:
    return house.post("/api/runs", who or house.people["rob"], {"plan": {
        "argv": ["true"], "tier": "none", "tenant": "lab", "guest": True, "weights": [version], **plan}})


def test_a_plan_loads_only_what_is_registered_and_not_retired(lab: House) -> None:
    run, version = trained(lab)
    assert code_of(load(lab, version)) == "not_found.version"
    register(lab, run)
    assert load(lab, version).status_code == 201
    assert lab.post(f"/api/versions/{version}/retire", lab.people["rob"], {}).status_code == 200
    assert code_of(load(lab, version)) == "conflict.version_state"


def test_a_plan_is_never_below_what_it_loads(lab: House) -> None:
    run, version = trained(lab, tier="high")
    register(lab, run)
    assert code_of(load(lab, version)) == "denied.tier"
    assert load(lab, version, tier="high").status_code == 201


def test_the_gate_is_asked_for_each_version_that_a_plan_loads(lab: House, monkeypatch: pytest.MonkeyPatch) -> None:
    run, version = trained(lab)
    register(lab, run)
    slot, real = lab.parts.gate, lab.parts.gate._decide
    asked = []

    def decide(call: Any, facts: Facts) -> Any:
        asked.append((call.action, call.resource.path))
        if (call.action, call.resource.path) == (Action.LOAD, "model/aurora"):
            return real(call, Facts(bundle_age_ms=NEVER_MS))  # nobody's roles
        return real(call, facts)

    assert load(lab, version).status_code == 201
    monkeypatch.setattr(slot, "_decide", decide)
    assert code_of(load(lab, version)) == "denied.no_match"
    assert (Action.LOAD, "model/aurora") in asked


def test_another_tenants_version_is_not_there(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    with writing(lab.parts.engine) as connection:
        plan = Plan(("x",), Tier.NONE, "lab", guest=True, weights=(version,))
        with pytest.raises(NotFound):
            registry.require_weights(connection, dataclasses.replace(plan, tenant="other"), "per_x")
        registry.require_weights(connection, plan, "per_x")


def test_what_is_retired_while_a_launch_is_under_way_is_not_placed(
    lab: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, version = trained(lab)
    register(lab, run)
    real = joint.runs._prepared

    def slow(*given: Any) -> Labels:
        found = real(*given)
        engines.retire(lab.parts, version, "per_x")
        return found

    assert load(lab, version).status_code == 201
    monkeypatch.setattr(joint.runs, "_prepared", slow)
    assert code_of(load(lab, version)) == "conflict.version_state"


def test_nobody_sends_the_plan_of_an_engine(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    approved(lab, version)
    plan = engine_plan(version, "aurora", Tier.NONE, "lab").as_json()
    assert code_of(lab.post("/api/runs", lab.people["rob"], {"plan": plan})) == "denied.serve"
    assert lab.post(f"/api/versions/{version}/serve", lab.people["rob"], {}).status_code == 201
    with reading(lab.parts.engine) as connection:
        for name, tier in (("other", Tier.NONE), ("aurora", Tier.HIGH)):
            with pytest.raises(Denied):
                registry.require_weights(connection, engine_plan(version, name, tier, "lab"), "per_x")
        registry.require_weights(connection, engine_plan(version, "aurora", Tier.NONE, "lab"), "per_x")


# --- approving --------------------------------------------------------------------------------------
def test_one_officer_approves_exactly_what_is_registered(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    asked = lab.post(f"/api/versions/{version}/submit", lab.people["rob"], {}).json()
    assert asked["needed"] == 1
    assert lab.post(f"/api/versions/{version}/submit", lab.people["rob"], {}).json()["request"] == asked["request"]
    shown = lab.get(f"/api/approvals/{asked['request']}", lab.people["olga"]).json()
    assert set(shown["body"]) == {"version", "model", "number", "tier", "run", "step", "lineage"}
    assert (shown["kind"], shown["body"]["version"], shown["you_cannot"]) == ("version", version, "")
    assert state(lab) == "draft"
    approve(lab, asked["request"], "olga")
    assert settle(lab, asked["request"])["state"] == "approved"
    assert state(lab) == column(lab, version) == "approved"
    moved = records(lab, "registry.version_moved")
    assert [(r["facts"]["from"], r["facts"]["to"]) for r in moved] == [("draft", "approved")]
    assert code_of(lab.post(f"/api/versions/{version}/submit", lab.people["rob"], {})) == "conflict.version_state"


def test_critical_needs_two_officers(lab: House) -> None:
    run, version = trained(lab, provider="pkcs11")
    register(lab, run, tier="critical")
    asked = lab.post(f"/api/versions/{version}/submit", lab.people["rob"], {}).json()
    assert asked["needed"] == 2
    approve(lab, asked["request"], "olga")
    with pytest.raises(Denied) as caught:
        settle(lab, asked["request"])
    assert caught.value.code == "approval_required"
    assert column(lab, version) == "draft"
    approve(lab, asked["request"], "omar")
    assert settle(lab, asked["request"])["state"] == "approved"


def test_neither_creator_nor_owner_of_the_run_approves(lab: House) -> None:
    """Not even when a third person submits it, and both are officers by now."""
    dora, sam = lab.person("dora", "researcher"), lab.person("sam", "researcher")
    run, version = trained(lab, dora)
    register(lab, run, who="dora")
    with writing(lab.parts.engine) as connection:  # somebody else's registration of dora's run
        connection.execute(update(versions).where(versions.c.digest == version).values(created_by=sam.id))
    asked = lab.post(f"/api/versions/{version}/submit", lab.people["rob"], {}).json()
    with writing(lab.parts.engine) as connection:
        for human in (dora, sam):
            people.set_roles(connection, human.id, "lab", frozenset({"safety_officer"}))
        request = approvals.found(connection, asked["request"])
        for human in (dora, sam):
            person = people.by_id(connection, human.id)
            assert person is not None
            with pytest.raises(Denied) as caught:
                approvals.vote(connection, request, person, approve=True)
            assert caught.value.code == "denied.self_approval"
    approve(lab, asked["request"], "olga")
    assert settle(lab, asked["request"])["state"] == "approved"


def test_a_refused_request_can_be_asked_again(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    first = lab.post(f"/api/versions/{version}/submit", lab.people["rob"], {}).json()["request"]
    with writing(lab.parts.engine) as connection:
        person = people.by_id(connection, lab.people["olga"].id)
        assert person is not None
        approvals.vote(connection, approvals.found(connection, first), person, approve=False)
    with pytest.raises(Conflict):
        settle(lab, first)
    approved(lab, version)
    assert column(lab, version) == "approved"


def test_a_changed_body_voids_the_approval(lab: House) -> None:
    run, version = trained(lab, provider="pkcs11")
    register(lab, run)
    asked = lab.post(f"/api/versions/{version}/submit", lab.people["rob"], {}).json()["request"]
    approve(lab, asked, "olga")
    tier = update(versions).where(versions.c.digest == version)
    with writing(lab.parts.engine) as connection:
        connection.execute(tier.values(tier="high"))
    with pytest.raises(Conflict) as caught:
        settle(lab, asked)
    assert caught.value.code == "conflict.approval_changed"
    assert column(lab, version) == "draft"
    with writing(lab.parts.engine) as connection:
        connection.execute(tier.values(tier="none"))
    assert settle(lab, asked)["state"] == "approved"


def test_the_vote_of_the_last_officer_takes_effect(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    asked = lab.post(f"/api/versions/{version}/submit", lab.people["rob"], {}).json()["request"]
    ada, olga = lab.people["ada"], lab.people["olga"]
    refused = lab.post(f"/api/approvals/{asked}/approve", ada, {"code": code_for(lab, ada)})
    assert code_of(refused) == "denied.no_role"
    answer = lab.post(f"/api/approvals/{asked}/approve", olga, {"code": code_for(lab, olga), "reason": "evaluated"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["effect"] == {"version": version, "model": "aurora", "number": 1, "state": "approved"}
    assert column(lab, version) == "approved"


def test_votes_whose_effect_failed_are_found_by_submitting_again(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    asked = lab.post(f"/api/versions/{version}/submit", lab.people["rob"], {}).json()["request"]
    approve(lab, asked, "olga")
    again = lab.post(f"/api/versions/{version}/submit", lab.people["rob"], {}).json()
    assert again["effect"]["state"] == "approved"
    assert column(lab, version) == "approved"


def test_of_two_moves_at_once_one_wins(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    with writing(lab.parts.engine) as connection:
        row = rows.version(connection, version)
        assert row is not None
        registry.moved(lab.parts, connection, row, "retired", "per_x")
        with pytest.raises(Conflict) as caught:
            registry.moved(lab.parts, connection, row, "approved", "per_y")
    assert caught.value.code == "conflict.version_state"
    assert column(lab, version) == "retired"


def test_a_retired_version_is_approved_by_nobody(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    asked = lab.post(f"/api/versions/{version}/submit", lab.people["rob"], {}).json()["request"]
    approve(lab, asked, "olga")
    assert lab.post(f"/api/versions/{version}/retire", lab.people["rob"], {}).status_code == 200
    with pytest.raises(Conflict) as caught:
        settle(lab, asked)
    assert caught.value.code == "conflict.version_state"
    assert column(lab, version) == "retired"


# --- serving ----------------------------------------------------------------------------------------
def served(house: House) -> tuple[str, str]:
    """An engine of an approved version, placed: (version, run)."""
    run, version = trained(house)
    register(house, run)
    approved(house, version)
    answer = house.post(f"/api/versions/{version}/serve", house.people["rob"], {})
    assert answer.status_code == 201, answer.text
    return version, str(answer.json()["run"])


def test_serves_only_what_is_approved(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    rob = lab.people["rob"]
    assert code_of(lab.post(f"/api/versions/{version}/serve", rob, {})) == "conflict.version_state"
    approved(lab, version)
    assert code_of(lab.post(f"/api/versions/{version}/serve", lab.people["olga"], {})) == "approval_required"  # her own
    assert code_of(lab.post(f"/api/versions/{version}/serve", lab.people["omar"], {})) == "denied.no_match"
    answer = lab.post(f"/api/versions/{version}/serve", rob, {})
    assert answer.status_code == 201, answer.text
    with reading(lab.parts.engine) as connection:
        row = runs.one(connection, answer.json()["run"])
    assert row is not None
    plan = Plan.from_json(json.loads(row.plan))
    assert plan == engine_plan(version, "aurora", Tier.NONE, "lab")
    assert plan.argv == ("python", "-P", "-m", "runners.inference.engine", "--version", version, "--name", "aurora")
    assert (plan.serve, plan.guest, plan.resume, plan.restarts, plan.environment) == (True, True, True, 3, "guest")


def test_serving_critical_counts_the_officers_of_the_version(lab: House) -> None:
    run, version = trained(lab, provider="pkcs11")
    register(lab, run, tier="critical")
    approved(lab, version, "olga", "omar")
    rob, plan = lab.people["rob"], engine_plan(version, "aurora", Tier.CRITICAL, "lab")
    bare = lab.post(f"/api/versions/{version}/serve", rob, {})
    assert code_of(bare) == "step_up_required"
    assert bare.json()["error"]["details"]["bound"] == plan.digest()
    wrong = {"step_up": proof(lab, rob, plan.as_json(), "launch")}
    assert code_of(lab.post(f"/api/versions/{version}/serve", rob, wrong)) == "step_up_required"
    answer = lab.post(f"/api/versions/{version}/serve", rob, {"step_up": proof(lab, rob, plan.as_json(), "serve")})
    assert answer.status_code == 201, answer.text
    with reading(lab.parts.engine) as connection:
        row = runs.attempt(connection, answer.json()["run"], 1)
    assert row is not None
    told = Signed.from_json(json.loads(row.launch)).body()["facts"]["approvals"]
    assert sorted(told) == sorted(lab.people[n].id for n in ("olga", "omar"))


def test_an_approval_counts_only_while_its_officer_is_one(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    approved(lab, version)
    rob = lab.people["rob"]
    assert lab.post(f"/api/versions/{version}/serve", rob, {}).status_code == 201
    with writing(lab.parts.engine) as connection:
        people.set_roles(connection, lab.people["olga"].id, "lab", frozenset())
    assert code_of(lab.post(f"/api/versions/{version}/serve", rob, {})) == "approval_required"
    approved(lab, version, "omar")  # submitted and approved anew
    assert column(lab, version) == "approved"
    assert lab.post(f"/api/versions/{version}/serve", rob, {}).status_code == 201


def test_refuses_when_the_officer_who_approved_a_version_serves_it(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    approved(lab, version)
    with writing(lab.parts.engine) as connection:
        for name in ("olga", "omar"):
            people.set_roles(connection, lab.people[name].id, "lab", frozenset({"safety_officer", "researcher"}))
    refused = lab.post(f"/api/versions/{version}/serve", lab.people["olga"], {})
    assert code_of(refused) == "approval_required"
    assert "somebody else" in refused.json()["error"]["next_step"]  # it stands approved, so nobody could submit it
    assert lab.post(f"/api/versions/{version}/serve", lab.people["omar"], {}).status_code == 201  # control


def test_each_look_at_the_approvals_of_an_engine_leaves_its_owner_out(
    lab: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last one, in the transaction that places it."""
    run, version = trained(lab)
    register(lab, run)
    approved(lab, version)
    real, seen = registry.require_weights, list[str]()
    monkeypatch.setattr(registry, "require_weights", lambda c, p, owner: (seen.append(owner), real(c, p, owner)))
    assert lab.post(f"/api/versions/{version}/serve", lab.people["rob"], {}).status_code == 201
    assert len(seen) >= 2
    assert set(seen) == {lab.people["rob"].id}


def test_a_warm_engine_makes_its_version_serving_and_its_end_unmakes_it(lab: House) -> None:
    version, run = served(lab)
    with pytest.raises(Unavailable):
        engines.ready(lab.parts, "n1", run, 1)  # not live yet
    live(lab, run)
    assert state(lab) == "approved"
    with pytest.raises(Denied) as caught:
        engines.ready(lab.parts, "n2", run, 1)
    assert caught.value.code == "denied.node"
    assert engines.ready(lab.parts, "n1", run, 1)["state"] == "serving"
    engines.ready(lab.parts, "n1", run, 1)
    assert state(lab) == column(lab, version) == "serving"
    assert len(records(lab, "engine.ready")) == 1
    shown = lab.get("/api/models", lab.people["rob"]).json()["models"][0]["versions"][0]["engines"]
    assert [(e["run"], e["ready"]) for e in shown] == [(run, True)]
    live(lab, run, word="ended", exit=1)
    assert state(lab) == "approved"
    engines.keep_states(lab.parts)
    assert column(lab, version) == "approved"
    with pytest.raises(Conflict):
        engines.ready(lab.parts, "n1", run, 1)


def test_only_an_engine_is_ready_and_never_a_stopped_one(lab: House) -> None:
    _, run = served(lab)
    training = lab.launch()
    for each in (run, training):
        live(lab, each)
    with pytest.raises(Conflict) as caught:
        engines.ready(lab.parts, "n1", training, 1)
    assert caught.value.code == "conflict.engine"
    order = lab.stop(f"run:{run}")
    with pytest.raises(Halted):
        engines.ready(lab.parts, "n1", run, 1)
    assert order
    _, other = _again(lab)
    assert engines.ready(lab.parts, "n1", other, 1)["state"] == "serving"


def _again(house: House) -> tuple[str, str]:
    version = house.get("/api/models/aurora", house.people["rob"]).json()["versions"][0]["version"]
    run = house.post(f"/api/versions/{version}/serve", house.people["rob"], {}).json()["run"]
    live(house, run)
    return version, run


def test_retiring_stops_the_engines_and_is_final(lab: House) -> None:
    version, run = served(lab)
    live(lab, run)
    engines.ready(lab.parts, "n1", run, 1)
    rob = lab.people["rob"]
    assert code_of(lab.post(f"/api/versions/{version}/retire", lab.people["olga"], {})) == "denied.no_match"
    answer = lab.post(f"/api/versions/{version}/retire", rob, {}).json()
    assert (answer["state"], len(answer["stops"])) == ("retired", 1)
    stop = lab.get(f"/api/stops/{answer['stops'][0]}", rob).json()
    assert (stop["scope"], stop["actor"]) == (f"run:{run}", rob.id)
    assert state(lab) == "retired"
    assert lab.post(f"/api/versions/{version}/retire", rob, {}).json()["stops"] == []
    assert code_of(lab.post(f"/api/versions/{version}/serve", rob, {})) == "conflict.version_state"
    assert code_of(lab.post(f"/api/versions/{version}/submit", rob, {})) == "conflict.version_state"
    engines.keep_states(lab.parts)
    assert column(lab, version) == "retired"


def test_a_retired_version_is_not_restarted_once_its_stop_is_lifted(lab: House) -> None:
    version, run = served(lab)
    live(lab, run, word="ended", exit=1)
    rob = lab.people["rob"]
    assert lab.post(f"/api/runs/{run}/restart", rob, {}).status_code == 201
    live(lab, run, 2, word="ended", exit=1)
    assert lab.post(f"/api/versions/{version}/retire", rob, {}).json()["stops"] == []
    assert code_of(lab.post(f"/api/runs/{run}/restart", rob, {})) == "conflict.version_state"


# --- looking and the snapshot -----------------------------------------------------------------------
def test_models_are_seen_in_their_tenant(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    eve = lab.person("eve", "researcher")
    assert lab.get("/api/models/aurora", eve).status_code == 200
    with writing(lab.parts.engine) as connection:
        connection.exec_driver_sql("UPDATE models SET tenant = 'elsewhere'")
    mia = lab.person("mia", "researcher")  # nothing is kept of what she saw before
    assert lab.get("/api/models/aurora", mia).status_code == 404
    assert lab.get("/api/models", mia).json()["models"] == []
    assert code_of(lab.post(f"/api/versions/{version}/submit", mia, {})) == "not_found.version"
    assert [m["name"] for m in lab.get("/api/models", lab.people["olga"]).json()["models"]] == ["aurora"]


def offered(house: House) -> list[tuple[str, str]]:
    with reading(house.parts.engine) as connection:
        return [(str(v.digest), rows.state_of(v)) for v in rows.offered(connection)]


def test_a_new_version_takes_over_when_its_engine_is_warm(lab: House) -> None:
    old, run = served(lab)
    live(lab, run)
    assert offered(lab) == [(old, "approved")]
    engines.ready(lab.parts, "n1", run, 1)
    assert offered(lab) == [(old, "serving")]
    second, new = trained(lab)
    register(lab, second)
    assert offered(lab) == [(old, "serving")]
    approved(lab, new)
    assert offered(lab) == [(old, "serving")]
    engine = lab.post(f"/api/versions/{new}/serve", lab.people["rob"], {}).json()["run"]
    live(lab, engine)
    engines.ready(lab.parts, "n1", engine, 1)
    assert offered(lab) == [(new, "serving")]
    live(lab, engine, word="lost")
    assert offered(lab) == [(old, "serving")]
    assert column(lab, new) == "serving"
    engines.keep_states(lab.parts)
    assert column(lab, new) == "approved"



def test_refusals_of_the_registry_are_on_record(lab: House) -> None:
    run, version = trained(lab)
    assert code_of(register(lab, run, tier="critical")) == "denied.provider"
    assert register(lab, run).status_code == 201
    approved(lab, version)
    with writing(lab.parts.engine) as connection:
        people.set_roles(connection, lab.people["olga"].id, "lab", frozenset())
    serve = f"/api/versions/{version}/serve"
    assert code_of(lab.post(serve, lab.people["rob"], {})) == "approval_required"
    plan = engine_plan(version, "aurora", Tier.NONE, "lab").as_json()
    assert code_of(lab.post("/api/runs", lab.people["rob"], {"plan": plan})) == "denied.serve"
    lab.parts.desk.record_late()
    told = [(e["actor"], e["facts"]["act"], e["facts"]["code"]) for e in records_of(lab, "registry.refused")]
    rob = lab.people["rob"].id
    assert told == [(rob, "register", "denied.provider"), (rob, "serve", "approval_required")]
    assert "denied.serve" in [e["facts"]["code"] for e in records_of(lab, "run.refused")]


def records_of(house: House, kind: str) -> list[dict[str, Any]]:
    sequence(house.parts)
    return [r.event for r in house.parts.ledger.newest(limit=100, type=kind)]


def test_an_engine_is_not_started_again_once_its_officer_left(lab: House) -> None:
    run, version = trained(lab)
    register(lab, run)
    approved(lab, version)
    serve = f"/api/versions/{version}/serve"
    engines_run = [str(lab.post(serve, lab.people["rob"], {}).json()["run"]) for _ in range(2)]
    fault = {"exit": 1, "signal": None, "result": "confirmed", "why": "ended"}
    live(lab, engines_run[0], word="ended", **fault)
    restarts.turn(lab.parts, {})
    assert attempt_of(lab, engines_run[0]) == 2
    with writing(lab.parts.engine) as connection:
        people.set_roles(connection, lab.people["olga"].id, "lab", frozenset())
    live(lab, engines_run[1], word="ended", **fault)
    restarts.turn(lab.parts, {})
    assert attempt_of(lab, engines_run[1]) == 1
    assert records_of(lab, "run.refused")[-1]["facts"]["code"] == "approval_required"
    again = lab.post(f"/api/runs/{engines_run[1]}/restart", lab.people["rob"], {})
    assert code_of(again) == "approval_required"


def attempt_of(house: House, run: str) -> int:
    with reading(house.parts.engine) as connection:
        row = runs.one(connection, run)
    assert row is not None
    return int(row.attempt)


def lengthen(house: House, version: str, count: int) -> None:
    lineage = {"parents": [], "models": [f"m{n}" for n in range(count)], "datasets": [], "code": []}
    with writing(house.parts.engine) as connection:
        connection.execute(update(versions).where(versions.c.digest == version).values(lineage=json.dumps(lineage)))


def test_a_version_has_no_more_ancestors_than_nodes_read(lab: House) -> None:
    run, version = trained(lab, model="base")
    register(lab, run)
    lengthen(lab, version, registry.MAX_ANCESTORS - 1)
    enough, _ = trained(lab, weights=[version])
    assert register(lab, enough, "child").status_code == 201
    lengthen(lab, version, registry.MAX_ANCESTORS)
    too_many, _ = trained(lab, weights=[version])
    assert code_of(register(lab, too_many, "grandchild")) == "conflict.lineage"


def test_an_order_that_no_node_could_read_is_not_signed(lab: House) -> None:
    """Its labels would make every heartbeat of its node fail: one launch, and all runs beside it lose their lease."""
    run, version = trained(lab, model="base")
    register(lab, run)
    lengthen(lab, version, 1025)
    refused = lab.post("/api/runs", lab.people["rob"], {"plan": {
        "argv": ["true"], "tier": "none", "tenant": "lab", "guest": True, "weights": [version]}})
    assert refused.status_code == 422, refused.text
    lengthen(lab, version, 1000)
    assert trained(lab, weights=[version])


def test_a_stop_of_a_model_reaches_the_run_that_made_it(lab: House) -> None:
    """It was launched under no name, so its labels do not tell, and it holds the weights."""
    maker, version = trained(lab)
    child, _ = trained(lab, weights=[version]) if register(lab, maker).status_code == 201 else ("", "")
    bystander, _ = trained(lab)
    live(lab, maker)
    assert engines.stop_makers(lab.parts) == []
    lab.stop("model:aurora")
    (order,) = engines.stop_makers(lab.parts)
    with reading(lab.parts.engine) as connection:
        standing = lab.parts.desk.standing(connection)
    assert (str(standing.stops[order].scope), standing.stops[order].actor) == (f"run:{maker}", lab.people["cora"].id)
    assert [standing.stopped(labels(lab, run)) is None for run in (maker, child, bystander)] == [False, False, True]
    assert engines.stop_makers(lab.parts) == []  # once


def test_a_later_attempt_knows_what_its_run_has_made(lab: House) -> None:
    run, _ = trained(lab, restarts=2)
    register(lab, run)
    live(lab, run, word="ended", exit=1)
    assert lab.post(f"/api/runs/{run}/restart", lab.people["rob"], {}).status_code == 201
    assert (labels(lab, run).lineage, labels(lab, run, 2).lineage) == ((), ("aurora",))
    live(lab, run, 2, word="ended", exit=1)
    lab.stop("model:aurora")
    assert lab.post(f"/api/runs/{run}/restart", lab.people["rob"], {}).status_code == 423


def test_who_has_no_role_hears_what_he_may_call_and_not_how_it_was_made(lab: House) -> None:
    run, version = trained(lab, datasets=[{"name": "text", "path": "/srv/secret-text"}])
    register(lab, run)
    paula = lab.person("paula")
    assert lab.get("/api/models/aurora", paula).json()["versions"] == []  # a draft
    approved(lab, version)
    for path in ("/api/models", "/api/models/aurora"):
        told = lab.get(path, paula)
        assert (told.status_code, version in told.text) == (200, True)
        assert not any(word in told.text for word in (run, "secret-text", lab.people["rob"].id, '"rob"'))
        assert "secret-text" in lab.get(path, lab.people["rob"]).text
    assert lab.get("/api/nodes", paula).json()["nodes"][0]["facts"] == {}
    assert lab.get("/api/nodes", lab.people["rob"]).json()["nodes"][0]["facts"]["environments"] == ["guest"]
