"""What a person with an account, a full pool of threads or an odd database may not do to the others."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio.to_thread
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fastapi.testclient import TestClient
from sqlalchemy import text

from control_plane import admission, joining, lifecycle
from control_plane import app as joint
from control_plane.api import context
from control_plane.api import runs as runs_api
from control_plane.auth import apikeys
from control_plane.store import people
from control_plane.store.db import reading, writing
from control_plane.ticker import Ticker, sequence
from interlock.errors import Untrusted
from interlock.order import Scope
from interlock.signed import public_text
from tests.control_plane.conftest import House, Human
from tests.control_plane.test_runs import approve, proof


@contextmanager
def locked(house: House) -> Iterator[None]:
    """Somebody else holds the database's write lock."""
    lock = sqlite3.connect(str(house.parts.engine.url.database), isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        lock.execute("ROLLBACK")
        lock.close()


def count(house: House, query: str) -> int:
    with reading(house.parts.engine) as connection:
        return int(connection.execute(text(query)).scalar_one())


def change(house: House, statement: str) -> None:
    with writing(house.parts.engine) as connection:
        connection.execute(text(statement))


def key_of(house: House, who: Human, *scopes: str) -> Human:
    with writing(house.parts.engine) as connection:
        made, _ = apikeys.mint(connection, who.id, "robot", scopes, 1)
    return Human(who.id, who.name, made, who.key)


def code_of(answer: Any) -> str:
    return str(answer.json()["error"]["code"])


def test_a_stop_waits_for_no_lock_of_the_database(staffed: House) -> None:
    change(staffed, "update sessions set seen_us = seen_us - 40000000")  # due to be noted as seen
    with locked(staffed):
        begun = time.monotonic()
        answers = [staffed.post("/api/stop", staffed.people["cora"], {"scope": "everything"}) for _ in range(4)]
        took = time.monotonic() - begun
        assert [a.status_code for a in answers] == [200] * 4
        assert took < 3
        assert len(staffed.parts.desk.feed(0)[0]) == 4
    staffed.parts.desk.close()
    staffed.parts.desk.catch_up()
    assert count(staffed, "select count(*) from orders") == 4


def test_a_stop_by_api_key_waits_for_no_lock_either(staffed: House) -> None:
    key = key_of(staffed, staffed.people["rob"], "stop")
    change(staffed, "update api_keys set used_us = 0")
    staffed.host()
    run = staffed.launch()
    with locked(staffed):
        begun = time.monotonic()
        assert staffed.post("/api/stop", key, {"scope": f"run:{run}"}).status_code == 200
        assert time.monotonic() - begun < 3


def test_nodes_hear_of_a_stop_while_the_catch_up_waits_for_the_database(staffed: House) -> None:
    desk = staffed.parts.desk
    staffed.stop("run:run_a")
    change(staffed, "delete from orders")
    with locked(staffed):
        waiting = threading.Thread(target=desk.catch_up)
        waiting.start()
        time.sleep(0.2)
        begun = time.monotonic()
        staffed.stop("run:run_b")
        assert time.monotonic() - begun < 3
    waiting.join(20)


def test_a_stop_needs_no_thread_of_the_common_pool(staffed: House) -> None:
    app, free = joint.people_app(staffed.parts), threading.Event()

    async def attack() -> httpx.Response:
        busy = [asyncio.create_task(anyio.to_thread.run_sync(free.wait)) for _ in range(60)]
        await asyncio.sleep(0.1)
        transport = httpx.ASGITransport(app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
                return await asyncio.wait_for(client.post(
                    "/api/stop", json={"scope": "everything"}, headers=staffed.people["cora"].headers), 5)
        finally:
            free.set()
            await asyncio.gather(*busy)

    assert asyncio.run(attack()).status_code == 200


def test_refuses_when_a_key_has_no_scope_to_stop(staffed: House) -> None:
    rob = staffed.people["rob"]
    staffed.host()
    run = staffed.launch()
    assert code_of(staffed.post("/api/stop", key_of(staffed, rob, "look"), {"scope": f"run:{run}"})) == "denied.scope"
    assert staffed.post("/api/stop", key_of(staffed, rob, "stop"), {"scope": f"run:{run}"}).status_code == 200


@pytest.mark.parametrize("reason", ["x" * 5000, "a\0b", "\u202e"])
def test_a_stop_is_never_refused_for_its_words(staffed: House, reason: str) -> None:
    order = staffed.post("/api/stop", staffed.people["cora"], {"scope": "everything", "reason": reason})
    assert order.status_code == 200, order.text
    kept = staffed.get(f"/api/stops/{order.json()['order']}", staffed.people["cora"]).json()["reason"]
    assert len(kept) <= 1000
    assert "\0" not in kept


# --- looking ---------------------------------------------------------------------------------------------
def looks(house: House) -> int:
    return count(house, "select count(*) from ledger_outbox where cast(body as text) like '%gate.decided%'")


def move(house: House, run: str, **values: str) -> None:
    change(house, f"update runs set {', '.join(f'{k} = {v!r}' for k, v in values.items())} where id = {run!r}")


def test_a_command_that_follows_its_run_does_not_fill_the_ledger(staffed: House) -> None:
    staffed.host()
    run, rob = staffed.launch(), staffed.people["rob"]
    staffed.get(f"/api/runs/{run}/output", rob)
    before = looks(staffed)
    for _ in range(20):
        assert staffed.get(f"/api/runs/{run}/output", rob).status_code == 200
        assert staffed.get(f"/api/runs/{run}", rob).status_code == 200
    assert looks(staffed) == before
    with writing(staffed.parts.engine) as connection:
        people.set_roles(connection, rob.id, "lab", frozenset({"auditor"}))
    assert staffed.get(f"/api/runs/{run}/output", rob).status_code == 200
    assert looks(staffed) == before + 1  # another role is another question


def test_refuses_when_a_run_is_of_a_tier_or_a_person_that_one_may_not_look_at(staffed: House) -> None:
    staffed.host()
    runs = {tier: staffed.launch() for tier in ("none", "critical")}
    move(staffed, runs["critical"], tier="critical")
    seen = {name: {r["run"] for r in staffed.get("/api/runs", staffed.people[name]).json()["runs"]}
            for name in ("ada", "cora", "rob")}
    assert seen == {"ada": {runs["none"]}, "cora": set(runs.values()), "rob": set(runs.values())}
    staffed.person("eve", "researcher")
    assert staffed.get("/api/runs", staffed.people["eve"]).json()["runs"] == []
    assert staffed.get(f"/api/runs/{runs['none']}", staffed.people["eve"]).status_code == 404


def test_live_parts_of_a_page_show_what_the_page_shows(staffed: House) -> None:
    staffed.host()
    run = staffed.launch()
    move(staffed, run, tier="critical")
    for path in ("/fragments/runs", "/runs"):
        shown = {name: run in staffed.client.get(
            path, headers={"cookie": f"{context.COOKIE}={staffed.people[name].session}"}).text
            for name in ("ada", "cora", "rob")}
        assert shown == {"ada": False, "cora": True, "rob": True}, path


def test_whoever_is_disabled_reads_no_further_output(staffed: House) -> None:
    staffed.host()
    run, rob = staffed.launch(), staffed.people["rob"]
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(staffed.get(f"/api/runs/{run}/output?wait=20", rob)))
    waiting.start()
    time.sleep(0.3)
    begun = time.monotonic()
    assert staffed.post("/api/people/rob/disable", staffed.people["ada"], {}).status_code == 200
    waiting.join(20)
    assert answers[0].status_code == 401
    assert time.monotonic() - begun < 6


@pytest.mark.parametrize("path", ["/api/audit/records?after={}", "/audit?before={}", "/api/runs/{{}}/output?after={}"])
def test_refuses_when_a_position_is_no_position(staffed: House, path: str) -> None:
    staffed.host()
    run, cora = staffed.launch(), staffed.people["cora"]
    headers = {**cora.headers, "cookie": f"{context.COOKIE}={cora.session}"}
    for position, status in ((2**70, 422), (2**40, 200)):
        assert staffed.client.get(path.format(position).format(run), headers=headers).status_code == status


def test_an_expired_request_says_so(staffed: House) -> None:
    staffed.host()
    rob = staffed.people["rob"]
    wanted = {"argv": ["true"], "tier": "critical", "tenant": "lab"}
    asked = staffed.post("/api/runs", rob, {"plan": wanted, "step_up": proof(staffed, rob, wanted)})
    request = asked.json()["error"]["details"]["request"]
    change(staffed, "update approval_requests set expires_us = 1")
    for found in (staffed.get(f"/api/approvals/{request}", staffed.people["olga"]).json(),
                  staffed.get("/api/approvals", staffed.people["olga"]).json()["approvals"][0]):
        assert found["state"] == "expired"
        assert "expired" in found["you_cannot"]


# --- launching -------------------------------------------------------------------------------------------
def test_a_stop_of_something_else_in_between_costs_no_second_factor(
    staffed: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The permit is void then and the question is asked once more: with the same proof and the same approval."""
    staffed.host()
    rob = staffed.people["rob"]
    wanted = {"argv": ["true"], "tier": "critical", "tenant": "lab"}
    code = proof(staffed, rob, wanted)
    asked = staffed.post("/api/runs", rob, {"plan": wanted, "step_up": code})
    approval = asked.json()["error"]["details"]["request"]
    approve(staffed, approval, "olga", "omar")
    start, stops = admission.start, iter(["run:run_other"])

    def late(*args: Any, **more: Any) -> Any:
        for scope in stops:
            staffed.parts.desk.accept_stop(Scope.parse(scope), "test", "in between")
        return start(*args, **more)

    monkeypatch.setattr(admission, "start", late)
    body = {"plan": wanted, "step_up": code, "approval": approval}
    made = staffed.post("/api/runs", rob, body)
    assert made.status_code == 201, made.text
    assert count(staffed, "select count(*) from step_ups where used_us > 0") == 1
    assert code_of(staffed.post("/api/runs", rob, {"plan": wanted, "step_up": code})) == "step_up_required"


@pytest.mark.parametrize(("outcome", "shown"), [
    ({"exit": 0, "why": "ended", "result": "confirmed"}, "ended"),
    ({"signal": 9, "why": "lease", "result": "confirmed"}, "stopped"),
    ({"signal": 9, "why": "order:stop_1", "result": "confirmed"}, "stopped"),
    ({"signal": 9, "why": "pipe", "result": "confirmed"}, "stopped"),
    ({"signal": 9, "why": "unavailable.supervisor", "result": "not_confirmed"}, "lost"),
])
def test_the_state_of_a_run_says_how_it_ended(staffed: House, outcome: dict[str, Any], shown: str) -> None:
    host = staffed.host()
    run = staffed.launch()
    assert len(host.beat((run, 1))["leases"]) == 1
    with writing(staffed.parts.engine) as connection:
        lifecycle.take(connection, "n1", run, 1, lifecycle.Report.from_json({"state": "ended", "outcome": outcome}))
    assert staffed.get(f"/api/runs/{run}", staffed.people["rob"]).json()["state"] == shown
    assert host.beat((run, 1))["leases"] == []


def test_a_run_that_counted_as_lost_is_live_again_with_its_next_lease(staffed: House) -> None:
    host = staffed.host()
    run = staffed.launch()
    host.beat((run, 1))
    change(staffed, "update attempts set lease_us = 1, granted_us = 1")
    with writing(staffed.parts.engine) as connection:
        assert lifecycle.lose_silent(connection) == [run]
    assert staffed.get(f"/api/runs/{run}", staffed.people["rob"]).json()["state"] == "lost"
    assert len(host.beat((run, 1))["leases"]) == 1
    assert staffed.get(f"/api/runs/{run}", staffed.people["rob"]).json()["state"] == "live"


# --- people ----------------------------------------------------------------------------------------------
def test_a_disabled_person_is_out_with_every_credential_and_his_runs_get_no_lease(staffed: House) -> None:
    host = staffed.host()
    rob, ada = staffed.people["rob"], staffed.people["ada"]
    key, run = key_of(staffed, rob, "look"), staffed.launch()
    assert staffed.get("/api/runs", key).status_code == 200
    assert code_of(staffed.post("/api/people/rob/disable", staffed.people["olga"], {})) == "denied.no_match"
    assert code_of(staffed.post("/api/people/nobody/disable", ada, {})) == "not_found.person"
    assert staffed.post("/api/people/rob/disable", ada, {}).json() == {"name": "rob", "disabled": True}
    assert [staffed.get("/api/runs", who).status_code for who in (rob, key)] == [401, 401]
    assert [r["code"] for r in host.beat((run, 1))["refused"]] == ["denied.owner"]
    shown = {p["name"]: p["disabled"] for p in staffed.get("/api/people", ada).json()["people"]}
    assert (shown["rob"], shown["ada"]) == (True, False)


def test_refuses_when_the_last_administrator_would_go(staffed: House) -> None:
    ada = staffed.people["ada"]
    assert code_of(staffed.post("/api/people/ada/disable", ada, {})) == "conflict.last_administrator"
    assert code_of(staffed.post("/api/people/ada/roles", ada, {"roles": ["researcher"]})) == (
        "conflict.last_administrator")
    second = staffed.person("amy", "administrator")
    assert staffed.post("/api/people/ada/disable", second, {}).status_code == 200


def test_links_of_a_disabled_administrator_are_void(staffed: House) -> None:
    amy = staffed.person("amy", "administrator")
    link = staffed.post("/api/invitations", amy, {"name": "sock", "roles": ["safety_officer"], "tenant": "lab"}).json()
    staffed.post("/api/people/amy/disable", staffed.people["ada"], {})
    begun = staffed.client.post("/api/enrol", json={
        "secret": link["link"].partition("#")[2], "password": "seven green kettles", "person_key": ""})
    assert code_of(begun) == "untrusted.link"


def test_roles_are_replaced_and_sessions_end(staffed: House) -> None:
    ada, rob = staffed.people["ada"], staffed.people["rob"]
    assert code_of(staffed.post("/api/people/rob/roles", rob, {"roles": ["administrator"]})) == "denied.no_match"
    answer = staffed.post("/api/people/rob/roles", ada, {"roles": ["on_call"]})
    assert answer.json() == {"name": "rob", "roles": ["on_call"]}
    assert staffed.get("/api/whoami", rob).status_code == 401


# --- floods ----------------------------------------------------------------------------------------------
def test_refuses_when_a_person_fills_the_disk_with_code(staffed: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_api, "MAX_CODE_PERSON", 3000)
    rob, eve = staffed.people["rob"], staffed.person("eve", "researcher")

    def upload(who: Human, data: bytes) -> Any:
        return staffed.client.post("/api/code", content=data, headers=who.headers)

    assert [upload(rob, bytes([n]) * 1000).status_code for n in range(3)] == [200] * 3
    assert code_of(upload(rob, b"x" * 1000)) == "conflict.code_quota"
    assert upload(rob, b"\x01" * 1000).status_code == 200  # the same file takes no more room
    assert upload(eve, b"x" * 1000).status_code == 200


def test_a_stranger_at_the_node_listener_does_not_fill_the_ledger(staffed: House) -> None:
    waiting = staffed.parts.desk.unrecorded()
    key = public_text(Ed25519PrivateKey.generate().public_key())
    for n in range(50):
        with pytest.raises(Untrusted):
            joining.join(staffed.parts, f"guess {n}", "csr", key)
    assert staffed.parts.desk.unrecorded() == waiting + 1


def test_a_thousand_stops_do_not_slow_a_heartbeat_down(staffed: House) -> None:
    """Any owner may stop his own run as often as he likes; heartbeats hold the database's only write lock."""
    host, desk = staffed.host(), staffed.parts.desk
    run = staffed.launch()
    desk._in_order_log = lambda _: None  # type: ignore[method-assign,assignment]  # the disk is not what is timed
    desk._in_database = lambda *_: True  # type: ignore[method-assign]
    for n in range(1000):
        desk.accept_stop(Scope.parse(f"run:run_{n}"), "test", "again")
    host.beat((run, 1), nonce="")
    begun = time.process_time()
    for _ in range(5):
        host.beat((run, 1), nonce="")
    assert (time.process_time() - begun) / 5 < 0.25


# --- an old database -------------------------------------------------------------------------------------
def test_refuses_when_a_restored_database_lacks_signed_records(staffed: House) -> None:
    """No second history under the same key: no head, export or launch; stops and records go on."""
    parts = staffed.parts
    staffed.host()
    sequence(parts)
    backup = staffed.state / "old.db"
    with sqlite3.connect(str(parts.engine.url.database)) as now, sqlite3.connect(backup) as old:
        now.backup(old)
    staffed.launch()
    sequence(parts)
    with sqlite3.connect(backup) as old, sqlite3.connect(str(parts.engine.url.database)) as now:
        old.backup(now)
    again = joint.build(parts.settings)
    try:
        assert joint.start(again) == {}
        ticker = Ticker.of(again)
        ticker.tick()
        assert ticker.faults == {"tree": "conflict.fork"}
        client = TestClient(joint.people_app(again, ticker))
        rob, cora, olga = (staffed.people[n] for n in ("rob", "cora", "olga"))
        plan = {"plan": {"argv": ["true"], "tier": "none", "tenant": "lab"}}
        assert code_of(client.post("/api/runs", json=plan, headers=rob.headers)) == "unavailable.evidence"
        assert code_of(client.post("/api/audit/exports", headers=olga.headers)) == "conflict.fork"
        assert client.post("/api/stop", json={"scope": "everything"}, headers=cora.headers).status_code == 200
        again.desk.record_late()
        kept = "select count(*) from ledger_outbox where cast(body as text) like '%stop.accepted%'"
        assert count(staffed, kept) == 1
        page = client.get("/", headers={"cookie": f"{context.COOKIE}={cora.session}"}).text
        assert "conflict.fork" in page
        assert "docs/runbooks/restore.md" in page
    finally:
        again.desk.close()
        again.engine.dispose()
