"""Run keys: minted with the run, released to the node that runs it while its lease lives, and to nobody else."""

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from control_plane import app as joint
from control_plane import key_release, settings
from control_plane import keys as run_key_book
from control_plane.keys import RunKeys
from control_plane.store import checkpoints, nodes, people, run_keys
from control_plane.store.db import now_us, reading, writing
from control_plane.store.runs import set_state
from control_plane.store.tables import attempts, models, runs, versions
from interlock.call import Action
from interlock.canon import digest_bytes
from interlock.errors import Conflict, Denied, Halted, Malformed, NotFound, NotRecorded, Refusal, Unavailable, Untrusted
from interlock.event import EventType
from interlock.manifest import FileRow, Manifest
from interlock.permit import boottime_ms
from interlock.sealed import wrap_file_key
from interlock.tier import Tier
from kms.assignment import Assignment
from kms.local import open_folder
from kms.provider import Context, Wrapped
from tests.control_plane.conftest import Host, House
from tests.control_plane.test_node_link import Link, incidents
from tests.control_plane.test_node_link import link as link  # a fixture
from tests.control_plane.test_runs import ask, code_of, plan, proof

SAVING = {"guest": True, "checkpoints": True}


@dataclass
class Lab:
    """A run that saves checkpoints, live on its node."""

    house: House
    host: Host
    run: str

    def ask(self, run: str = "", attempt: int = 1, node: str = "n1") -> dict[str, Any]:
        return key_release.keys_for(self.house.parts, node, run or self.run, attempt)

    def refused(self, **more: Any) -> Refusal:
        with pytest.raises(Refusal) as found:
            self.ask(**more)
        return found.value

    def key(self, run: str = "") -> bytes:
        return base64.b64decode(self.ask(run)["run_key"])

    def live(self, **more: Any) -> str:
        run = self.house.launch(**more)
        self.host.beat((run, 1))
        return run

    def sql(self, statement: Any) -> Any:
        with writing(self.house.parts.engine) as connection:
            return connection.execute(statement)

    def records(self, type_: EventType) -> list[dict[str, Any]]:
        self.house.parts.desk.record_late()
        self.house.parts.ledger.sequence()
        return [r.event for r in self.house.parts.ledger.rows(type=type_.value)]


@pytest.fixture
def lab(staffed: House) -> Lab:
    host = staffed.host()
    run = staffed.launch(**SAVING)
    host.beat((run, 1))
    return Lab(staffed, host, run)


# --- minting ----------------------------------------------------------------------------------------

def test_a_run_that_saves_gets_one_key_with_its_record_and_another_run_gets_none(lab: Lab) -> None:
    other = lab.house.launch()
    with reading(lab.house.parts.engine) as connection:
        kept, none = run_keys.one(connection, lab.run), run_keys.one(connection, other)
    assert kept is not None
    assert none is None
    assert (kept.wrapped.provider, kept.wrapped.version) == ("local", 1)
    assert kept.context.as_json() == {"tenant": "lab", "model": "", "run": lab.run, "tier": "none"}
    made = lab.records(EventType.RUN_KEY_MADE)
    assert [(e["run"], e["facts"]["provider"], e["facts"]["tier"]) for e in made] == [(lab.run, "local", "none")]
    assert len(lab.key()) == 32


def test_a_restart_goes_on_with_the_key_that_is_there(lab: Lab) -> None:
    run = lab.live(**SAVING, restarts=2)
    first = lab.key(run)
    with writing(lab.house.parts.engine) as connection:
        set_state(connection, run, 1, "ended", now_us())
    again = lab.house.post(f"/api/runs/{run}/restart", lab.house.people["rob"], {})
    assert again.status_code == 201, again.text
    lab.host.beat((run, 2))
    assert base64.b64decode(lab.ask(run, 2)["run_key"]) == first
    assert lab.refused(run=run).code == "conflict.attempt"


def test_refuses_a_launch_early_when_no_provider_fits_the_tier(lab: Lab) -> None:
    house, rob = lab.house, lab.house.people["rob"]
    wanted = plan(tier="high", **SAVING)
    step = proof(house, rob, wanted)
    refused = house.post("/api/runs", rob, {"plan": wanted, "step_up": step})
    assert code_of(refused) == "denied.provider"
    assert "kms.pkcs11" in refused.json()["error"]["next_step"]
    critical = plan(tier="critical", **SAVING)  # no person is asked for what cannot start
    asked = house.post("/api/runs", rob, {"plan": critical, "step_up": proof(house, rob, critical)})
    assert code_of(asked) == "denied.provider"
    without = plan(tier="high")  # saves nothing, so it needs no key
    answer = house.post("/api/runs", rob, {"plan": without, "step_up": proof(house, rob, without)})
    assert answer.status_code == 201, answer.text
    house.parts.keys._assignment = Assignment({**Assignment().tiers, Tier.HIGH: "local"})
    house.parts.keys._local = open_folder(house.parts.settings.places.keys / "run-kek", frozenset({Tier.HIGH}))
    answer = house.post("/api/runs", rob, {"plan": wanted, "step_up": step})  # the proof was not spent
    assert answer.status_code == 201, answer.text


def test_a_launch_whose_key_cannot_be_wrapped_places_and_spends_nothing(lab: Lab) -> None:
    house, rob = lab.house, lab.house.people["rob"]
    ring = house.parts.keys.provider_for(Tier.NONE)
    ring.disable()
    before = len(house.get("/api/runs", rob).json()["runs"])
    assert code_of(ask(house, rob, plan=plan(**SAVING))) == "denied.kek_disabled"
    assert len(house.get("/api/runs", rob).json()["runs"]) == before
    ring.enable()
    assert house.post("/api/runs", rob, {"plan": plan(**SAVING)}).status_code == 201


def test_refuses_when_the_permit_is_for_something_else(lab: Lab) -> None:
    parts = lab.house.parts
    with reading(parts.engine) as connection:
        kept = run_keys.one(connection, lab.run)
    assert kept is not None
    from interlock.call import Call, Resource, Subject
    from kms.envelope import mint
    from kms.release import release
    from policy.facts import Facts

    who = Subject("rob", "lab", "person", lab.house.people["rob"].id)
    facts = Facts(roles=frozenset({"researcher"}), bundle_age_ms=0)
    ring = parts.keys.provider_for(Tier.NONE)
    launch = parts.gate.ask(Call(Action.LAUNCH, who, Resource("pool", "default", "lab"), lab.run), facts)
    given = parts.gate.ask(Call(Action.RELEASE_KEY, who, Resource("run", lab.run, "lab"), lab.run), facts)
    live: Callable[[], bool] = lambda: True  # noqa: E731
    epoch = parts.desk.epoch()
    with pytest.raises(Untrusted):
        release(launch, lab.run, kept, ring, epoch=epoch, lease_live=live)
    with pytest.raises(Untrusted):
        release(given, "run_other", kept, ring, epoch=epoch, lease_live=live)
    with pytest.raises(Halted):
        release(given, lab.run, kept, ring, epoch=epoch + 1, lease_live=live)
    with pytest.raises(Denied) as refused:
        release(given, lab.run, kept, ring, epoch=epoch, lease_live=lambda: False)
    assert refused.value.code == "denied.lease"
    assert len(release(given, lab.run, kept, ring, epoch=epoch, lease_live=live)) == 32
    wanted = {"action": Action.LAUNCH, "resource": "pool/default", "epoch": epoch}
    with pytest.raises(Untrusted):
        mint(given, ring, kept.context, **wanted)
    with pytest.raises(Untrusted):
        mint(launch, ring, replace(kept.context, run="run_other"), **wanted)
    assert mint(launch, ring, kept.context, **wanted).wrapped.data != kept.wrapped.data


# --- release of a run's own key ---------------------------------------------------------------------

def test_the_node_gets_the_key_and_a_record_says_so_without_it(lab: Lab) -> None:
    answer = lab.ask()
    assert answer == {"run_key": base64.b64encode(lab.key()).decode(), "files": {}, "newest": None}
    released = lab.records(EventType.RUN_KEY_RELEASED)
    assert released[0]["facts"] | {"record": ""} == {
        "attempt": 1, "node": "n1", "own": True, "providers": ["local"], "purpose": "train", "record": "",
        "versions": []}
    assert released[0]["actor"] == lab.house.people["rob"].id
    text = json.dumps([r.event for r in lab.house.parts.ledger.rows()])
    key = base64.b64decode(answer["run_key"])
    for shown in (answer["run_key"], key.hex(), base64.urlsafe_b64encode(key).decode()):
        assert shown not in text
    for path in lab.house.state.rglob("*"):
        if path.is_file():
            assert key not in path.read_bytes()


def test_refuses_without_a_live_lease_and_unwraps_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = lab.house.launch(**SAVING)
    asked: list[object] = []
    ring = lab.house.parts.keys.provider_for(Tier.NONE)
    with monkeypatch.context() as patch:
        patch.setattr(ring, "unwrap", lambda *_: asked.append(1))
        assert lab.refused(run=fresh).code == "denied.lease"
        now = boottime_ms()
        for later in (60_000, 3_600_000, -1_000):  # its life is over; or the clock of all deadlines ran backwards
            patch.setattr(run_key_book, "boottime_ms", lambda later=later: now + later)
            assert lab.refused().code == "denied.lease"
    assert asked == []
    assert lab.key()
    lab.host.beat((fresh, 1))
    assert lab.key(fresh)


def test_after_a_start_of_the_control_plane_a_heartbeat_is_needed_first(lab: Lab) -> None:
    key = lab.key()
    place = lab.house.parts.settings.places.keys / run_key_book.FOLDER
    object.__setattr__(lab.house.parts, "keys", RunKeys(Assignment(), place))
    assert lab.refused().code == "denied.lease"
    lab.host.beat((lab.run, 1))
    assert lab.key() == key


def test_refuses_another_node(lab: Lab) -> None:
    lab.house.host("n2")
    refused = lab.refused(node="n2")
    assert (type(refused), refused.code) == (Denied, "denied.node")
    assert lab.key()


def test_refuses_a_run_that_a_stop_covers_by_any_scope(lab: Lab) -> None:
    rob = lab.house.people["rob"].id
    for scope in (f"run:{lab.run}", "tenant:lab", f"subject:{rob}", "node:n1", "model:small", "everything"):
        run = lab.live(**SAVING, model="small") if scope == "model:small" else lab.run
        fresh = Lab(lab.house, lab.host, run)
        assert fresh.key()
        lab.house.stop(scope)
        refused = fresh.refused()
        assert (type(refused), refused.code) == (Halted, "stopped.order"), scope
        _forget_stops(lab)
    lab.house.stop("run:run_other")
    assert lab.key()


def _forget_stops(lab: Lab) -> None:
    """Lift every stop without two officers: only a test can, by taking the lists away."""
    desk = lab.house.parts.desk
    places = lab.house.parts.settings.places
    for path in places.orders.glob("0*.json"):
        path.unlink()
    (places.control / "accepted.log").write_bytes(b"")
    from control_plane.order_log import AcceptedList
    from control_plane.store.tables import orders

    lab.sql(orders.delete())
    desk._accepted = AcceptedList(places.control / "accepted.log")
    desk._known.clear(), desk._stored.clear(), desk._feed.clear()


def test_refuses_a_run_that_was_resumed_but_not_granted_anew(lab: Lab) -> None:
    """G7: a permit older than the last order that matched the run is worth nothing."""
    assert lab.key()
    lab.house.stop(f"run:{lab.run}")
    with reading(lab.house.parts.engine) as connection:
        standing = lab.house.parts.desk.standing(connection)
    lifted = replace(standing, cleared=frozenset(standing.stops))
    lab.house.parts.desk.granting = lambda _c: lifted  # type: ignore[method-assign]
    refused = lab.refused()
    assert (type(refused), refused.code) == (Halted, "stopped.epoch")


def test_refuses_an_attempt_that_is_over_or_was_never(lab: Lab) -> None:
    assert lab.key()
    assert lab.refused(attempt=2).code == "not_found.attempt"
    assert lab.refused(attempt=0).code == "malformed"
    assert lab.refused(run="run_nobody").code == "not_found.attempt"
    with writing(lab.house.parts.engine) as connection:
        set_state(connection, lab.run, 1, "ended", now_us())
    assert lab.refused().code == "conflict.over"


def test_refuses_when_the_owner_is_disabled_or_lost_the_role(lab: Lab) -> None:
    rob = lab.house.people["rob"].id
    assert lab.key()
    with writing(lab.house.parts.engine) as connection:
        people.set_disabled(connection, rob, True)
    assert lab.refused().code == "denied.owner"
    with writing(lab.house.parts.engine) as connection:
        people.set_disabled(connection, rob, False)
        people.set_roles(connection, rob, "lab", frozenset({"auditor"}))
    assert lab.refused().code == "denied.no_match"
    with writing(lab.house.parts.engine) as connection:
        people.set_roles(connection, rob, "lab", frozenset({"researcher"}))
    assert lab.key()


def test_refuses_a_plan_without_checkpoints(lab: Lab) -> None:
    assert lab.refused(run=lab.live(guest=True)).code == "denied.plan"
    assert lab.key()


def test_refuses_a_wrapped_key_that_was_put_under_another_run(lab: Lab) -> None:
    """The context comes from the run's own row, so rows that were exchanged in the database open nothing."""
    other = lab.live(**SAVING)
    key = lab.key()
    with reading(lab.house.parts.engine) as connection:
        mine, theirs = run_keys.one(connection, lab.run), run_keys.one(connection, other)
    assert mine
    assert theirs
    same = run_keys.run_keys.c.run == lab.run
    lab.sql(update(run_keys.run_keys).where(same).values(
        wrapped=theirs.wrapped.data, context=json.dumps(theirs.context.as_json())))
    assert lab.refused().code == "untrusted.key_context"
    lab.sql(update(run_keys.run_keys).where(same).values(
        wrapped=mine.wrapped.data, context=json.dumps(mine.context.as_json())))
    assert lab.key() == key
    lab.sql(run_keys.run_keys.delete().where(same))
    assert lab.refused().code == "not_found.run_key"


def test_refuses_when_a_stop_comes_in_after_the_gate_said_yes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between unwrapping and the record: nothing leaves. One order about something else is asked past, once."""
    ring = lab.house.parts.keys.provider_for(Tier.NONE)
    real, left = ring.unwrap, [1, 1, 1]

    def stopping(*words: Any) -> bytes:
        key = real(*words)
        if left:
            left.pop()
            lab.house.stop("run:run_other")  # any order moves the epoch, and the permit is void
        return key

    with monkeypatch.context() as patch:
        patch.setattr(ring, "unwrap", stopping)
        refused = lab.refused()
        assert (type(refused), refused.code) == (Halted, "stopped.epoch")
        assert lab.records(EventType.RUN_KEY_RELEASED) == []
        assert len(left) == 1
        assert lab.key()
        assert left == []


def test_refuses_when_the_lease_ends_right_before_the_key_is_unwrapped(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = lab.house.parts.keys
    answers: Iterator[bool] = iter([True, False])
    asked: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(keys, "lease_live", lambda *_: next(answers))
        patch.setattr(keys.provider_for(Tier.NONE), "unwrap", lambda *_: asked.append(1))
        assert lab.refused().code == "denied.lease"
    assert asked == []
    assert lab.key()


def test_refuses_when_nothing_can_be_recorded(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = lab.house.parts.ledger
    real = ledger.record

    def full(event: Any, connection: Any = None) -> Any:
        if event.type is EventType.RUN_KEY_RELEASED:
            raise NotRecorded("the disk is full")
        return real(event, connection)

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "record", full)
        assert lab.refused().code == "not_recorded"
    assert lab.key()


def test_a_refusal_is_on_record_once_a_minute(lab: Lab) -> None:
    fresh = lab.house.launch(**SAVING)
    for _ in range(3):
        lab.refused(run=fresh)
    found = lab.records(EventType.RUN_KEY_REFUSED)
    assert [(e["run"], e["actor"], e["facts"]["code"]) for e in found] == [(fresh, "node/n1", "denied.lease")]


def test_a_run_goes_on_under_a_rewrapped_key(lab: Lab) -> None:
    key, ring = lab.key(), lab.house.parts.keys.provider_for(Tier.NONE)
    assert ring.rotate() == 2
    with writing(lab.house.parts.engine) as connection:
        assert lab.run in run_keys.of_version(connection, "local", 1)
        kept = run_keys.one(connection, lab.run)
        assert kept is not None
        new = ring.rewrap(kept.wrapped, kept.context)
        assert run_keys.replace(connection, lab.run, kept.wrapped, new)
        assert not run_keys.replace(connection, lab.run, kept.wrapped, new)
        assert run_keys.of_version(connection, "local", 2) == [lab.run]
    assert lab.key() == key
    ring.set_minimum(2)
    assert lab.key() == key


# --- versions ---------------------------------------------------------------------------------------

FILES = {"a-0.sealed": b"\1" * 32, "a-1.sealed": b"\2" * 32}


def version(lab: Lab, *, run: str = "", model: str = "small", state: str = "approved", tier: str = "none",
            lineage: dict[str, Any] | None = None, key: bytes = b"", tenant: str = "lab", step: int = 7) -> str:
    """Register a checkpoint of `run` as its node and the registry would."""
    run = run or lab.run
    key = key or lab.key(run)
    rows = tuple(FileRow(name, 100, digest_bytes(name.encode()), wrap_file_key(key, file_key, run, step, name))
                 for name, file_key in FILES.items())
    manifest = Manifest(run, step, 1, "weights", None, 2, {}, rows)
    now, rob = now_us(), lab.house.people["rob"].id
    with writing(lab.house.parts.engine) as connection:
        checkpoints.add(connection, digest=manifest.digest(), run=run, step=step, attempt=1, kind="weights", items=2,
                        bytes=200, parent="", node="n1", manifest=manifest.seal(key), committed_us=now)
        if connection.execute(select(models).where(models.c.name == model)).first() is None:
            connection.execute(insert(models).values(name=model, tenant=tenant, owner=rob, tier=tier, created_us=now))
        connection.execute(insert(versions).values(
            digest=manifest.digest(), model=model, number=1, tier=tier, state=state, run=run, step=step,
            lineage=json.dumps({"parents": [], "models": [], "datasets": [], "code": [], **(lineage or {})}),
            request="", created_by=rob, created_us=now, moved_us=now))
    return manifest.digest()


def child(lab: Lab, *digests: str, **more: Any) -> str:
    """Put `weights` into the plan of a live run; whether such a plan is admitted is the registry's matter."""
    run = lab.live(guest=True, **more)
    with reading(lab.house.parts.engine) as connection:
        made = json.loads(connection.execute(select(runs.c.plan).where(runs.c.id == run)).scalar_one())
    made["weights"] = list(digests)
    lab.sql(update(runs).where(runs.c.id == run).values(plan=json.dumps(made)))
    return run


def engine(lab: Lab, digest: str, **more: Any) -> str:
    run = child(lab, digest, model="small", **more)
    with reading(lab.house.parts.engine) as connection:
        made = json.loads(connection.execute(select(runs.c.plan).where(runs.c.id == run)).scalar_one())
    lab.sql(update(runs).where(runs.c.id == run).values(plan=json.dumps({**made, "serve": True})))
    return run


def test_a_child_gets_the_file_keys_of_the_manifest_and_never_the_source_runs_key(lab: Lab) -> None:
    digest = version(lab)
    answer = lab.ask(child(lab, digest))
    wanted = {name: base64.b64encode(key).decode() for name, key in FILES.items()}
    assert answer == {"run_key": None, "files": {digest: wanted}, "newest": None}
    assert lab.ask()["newest"] == [7, 1]  # the run itself is told what it committed last
    assert base64.b64encode(lab.key()).decode() not in json.dumps(answer)
    both = lab.ask(child(lab, digest, checkpoints=True))
    assert both["files"] == {digest: wanted}
    assert base64.b64decode(both["run_key"]) != lab.key()
    released = lab.records(EventType.RUN_KEY_RELEASED)
    assert [e["facts"]["versions"] for e in released].count([digest]) == 2
    text = json.dumps([r.event for r in lab.house.parts.ledger.rows()])
    assert not [k for k in wanted.values() if k in text]


def test_an_engine_gets_an_approved_or_serving_version_only(lab: Lab) -> None:
    digest = version(lab, state="draft")
    run = engine(lab, digest)
    for state, code in (("draft", "conflict.version_state"), ("retired", "conflict.version_state"),
                        ("approved", ""), ("serving", "")):
        lab.sql(update(versions).where(versions.c.digest == digest).values(state=state))
        if code:
            assert lab.refused(run=run).code == code
        else:
            assert lab.ask(run)["files"][digest]
    assert {e["facts"]["purpose"] for e in lab.records(EventType.RUN_KEY_RELEASED)} == {"train", "serve"}


def test_a_child_may_load_a_draft_but_nothing_retired(lab: Lab) -> None:
    digest = version(lab, state="draft")
    run = child(lab, digest)
    assert lab.ask(run)["files"][digest]
    lab.sql(update(versions).where(versions.c.digest == digest).values(state="retired"))
    assert lab.refused(run=run).code == "conflict.version_state"


def test_refuses_what_is_not_registered_or_another_tenants(lab: Lab) -> None:
    digest = version(lab)
    assert lab.refused(run=child(lab, digest_bytes(b"nothing"))).code == "not_found.version"
    run = child(lab, digest)
    assert lab.ask(run)["files"]
    lab.sql(update(models).values(tenant="other"))
    assert lab.refused(run=run).code == "not_found.version"


@pytest.mark.parametrize("what", ["run", "model", "ancestor", "parent"])
def test_a_stopped_source_gives_its_key_to_no_engine_and_no_child(lab: Lab, what: str) -> None:
    digest = version(lab, lineage={"models": ["elder"], "parents": ["sha256:" + "0" * 64]})
    asking = [engine(lab, digest), child(lab, digest)]
    for run in asking:
        lab.sql(update(runs).where(runs.c.id == run).values(model=""))  # its own labels are not what refuses here
        lab.sql(update(attempts).where(attempts.c.run == run).values(labels=_without_model(lab, run)))
        assert lab.ask(run)["files"], what
    scopes = {"run": f"run:{lab.run}", "model": "model:small", "ancestor": "model:elder",
              "parent": "model:sha256:" + "0" * 64}
    lab.house.stop(scopes[what])
    for run in asking:
        refused = lab.refused(run=run)
        assert (type(refused), refused.code) == (Halted, "stopped.order")


def _without_model(lab: Lab, run: str) -> str:
    with reading(lab.house.parts.engine) as connection:
        labels = json.loads(connection.execute(select(attempts.c.labels).where(attempts.c.run == run)).scalar_one())
    return json.dumps({**labels, "model": "", "lineage": []})


def test_refuses_weights_of_a_higher_tier_and_a_critical_version_under_a_key_file(lab: Lab) -> None:
    digest = version(lab)
    run = child(lab, digest)
    assert lab.ask(run)["files"]
    lab.sql(update(versions).values(tier="high"))
    assert lab.refused(run=run).code == "denied.tier"
    lab.sql(update(versions).values(tier="critical"))
    with reading(lab.house.parts.engine) as connection:
        made = json.loads(connection.execute(select(runs.c.plan).where(runs.c.id == run)).scalar_one())
    lab.sql(update(runs).where(runs.c.id == run).values(plan=json.dumps({**made, "tier": "critical"})))
    assert lab.refused(run=run).code == "denied.provider"


def test_refuses_a_manifest_that_does_not_verify_or_is_anothers(lab: Lab) -> None:
    digest = version(lab)
    run = child(lab, digest)
    assert lab.ask(run)["files"]
    table = checkpoints.checkpoints
    with reading(lab.house.parts.engine) as connection:
        row = checkpoints.one(connection, digest)
    assert row is not None
    good = bytes(row.manifest)
    other = Manifest(lab.run, 8, 1, "weights", None, 2, {}, (
        FileRow("a-0.sealed", 1, digest_bytes(b""), wrap_file_key(lab.key(), b"\3" * 32, lab.run, 8, "a-0.sealed")),))
    for bad in (good[:-3] + b"A" + good[-2:], b"{}", b"\x80\x04.", other.seal(b"\0" * 32), other.seal(lab.key())):
        lab.sql(update(table).where(table.c.digest == digest).values(manifest=bad))
        assert isinstance(lab.refused(run=run), Untrusted | Malformed), bad[:40]
    lab.sql(update(table).where(table.c.digest == digest).values(manifest=good))
    assert lab.ask(run)["files"]


# --- settings and start -----------------------------------------------------------------------------

def configure(house: House, **more: Any) -> settings.Settings:
    path = house.parts.settings.places.control / "settings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    return replace(settings.load(house.state), extra_hosts=("testserver",))


def test_refuses_to_start_when_critical_is_local(house: House) -> None:
    with pytest.raises(Conflict) as refused:
        configure(house, kms={"tiers": {"critical": "local"}})
    assert refused.value.code == "conflict.kms_tier"
    assert configure(house, kms={"tiers": {"high": "local"}}).kms.provider(Tier.HIGH) == "local"


def test_init_makes_the_key_file_and_a_state_from_before_gets_it_at_start(house: House) -> None:
    folder = house.parts.settings.places.keys / "run-kek"
    assert oct((folder / "v1.key").stat().st_mode & 0o777) == "0o600"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    again = joint.build(settings.load(house.state))
    assert joint.start(again) == {}
    assert (folder / "v1.key").stat().st_size == 32
    again.desk.close()
    again.engine.dispose()


def test_a_kek_that_is_gone_is_told_and_no_other_is_made_in_its_place(lab: Lab, tmp_path: Path) -> None:
    """A state that was restored without run-kek: a new KEK would be in the way of the old one, or be lost by it."""
    key, house = lab.key(), lab.house
    folder = house.parts.settings.places.keys / "run-kek"
    shutil.copytree(folder, tmp_path / "kept")
    shutil.rmtree(folder)
    again = joint.build(settings.load(house.state))
    assert joint.start(again) == {"keys": "conflict.kek_state"}  # it starts: stops must go on
    assert list(folder.glob("*.key")) == []
    with pytest.raises(Conflict) as refused:
        again.keys.provider_for(Tier.NONE).generate(Context("lab", "small", "run_9", Tier.NONE))
    assert refused.value.code == "conflict.kek_state"
    again.desk.close()
    again.engine.dispose()
    assert lab.refused().code == "not_found.kek"
    shutil.copytree(tmp_path / "kept", folder, dirs_exist_ok=True)
    assert lab.key() == key  # control
    assert joint.start(house.parts) == {}


def test_a_control_plane_starts_without_its_token_and_says_so_at_launch(house: House, tmp_path: Path) -> None:
    place = {"module": str(tmp_path / "m.so"), "token": "cp", "pin_file": str(tmp_path / "pin")}
    parts = joint.build(configure(house, kms={"pkcs11": place, "tiers": {"none": "pkcs11"}}))
    with pytest.raises(Unavailable):
        parts.keys.provider_for(Tier.NONE).prepare()
    with pytest.raises(Denied) as refused:
        house.parts.keys.named("pkcs11")
    assert refused.value.code == "denied.provider"
    assert parts.keys.named("local").name == "local"
    parts.desk.close()
    parts.engine.dispose()


def test_old_leases_are_forgotten(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, now = lab.house.parts.keys, boottime_ms()
    for number in range(4096):
        keys.leased(f"run_{number}", 1)
    with monkeypatch.context() as patch:
        patch.setattr(run_key_book, "boottime_ms", lambda: now + 3_600_000)
        keys.leased("run_new", 1)
        assert keys.lease_live("run_new", 1, 10_000)
    assert len(keys._leased) == 1


# --- the route --------------------------------------------------------------------------------------

def test_over_the_node_link_only_the_runs_node_is_answered_and_another_leaves_an_incident(link: Link) -> None:
    house = link.house
    first = house.host("n1")
    run = house.launch(**SAVING)
    first.beat((run, 1))
    second = house.host("n2")
    path = f"/node/runs/{run}/1/keys"
    answer = link.send(first, "POST", path, json={})
    assert answer.status_code == 200, answer.text
    assert len(base64.b64decode(answer.json()["run_key"])) == 32
    assert answer.headers["cache-control"] == "no-store"
    refused = link.send(second, "POST", path, json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "denied.node")
    assert len(incidents(house)) == 1
    assert link.send(None, "POST", path, json={}).status_code == 401
    for body in ({"nonce": "AAAA"}, {"node": "n1"}, {"context": {}}):  # pitfall 8: nobody names a nonce
        assert link.send(first, "POST", path, json=body).status_code == 422
    with writing(house.parts.engine) as connection:
        nodes.revoke(connection, "n1")
    assert link.send(first, "POST", path, json={}).json()["error"]["code"] == "denied.node_revoked"


def test_a_wrapped_key_of_an_unknown_provider_is_refused(lab: Lab) -> None:
    key = lab.key()
    with writing(lab.house.parts.engine) as connection:
        kept = run_keys.one(connection, lab.run)
        assert kept is not None
        gone = Wrapped("pkcs11", kept.wrapped.kek, 1, kept.wrapped.data)
        assert run_keys.replace(connection, lab.run, kept.wrapped, gone)
    assert lab.refused().code == "denied.provider"
    with writing(lab.house.parts.engine) as connection:
        assert run_keys.replace(connection, lab.run, gone, replace(kept.wrapped, kek="kek-0"))
    refused = lab.refused()
    assert (type(refused), refused.code) == (NotFound, "not_found.kek")
    with writing(lab.house.parts.engine) as connection:
        assert run_keys.replace(connection, lab.run, gone, kept.wrapped)
    assert lab.key() == key
