"""The supervisor in the test's process: real disk, real groups, a control plane played by the test."""

import ctypes
import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interlock.errors import Conflict, Denied, Halted, Malformed, Refusal, Stale, Unavailable, Untrusted
from interlock.order import Result, StopOrder
from interlock.permit import boottime_ms
from interlock.signed import RECEIPT, STOP, Signed, key_id, sign, verify
from interlock.tier import Tier
from killswitch import supervisor as room
from killswitch.admission import admit, ended, go, spawned
from killswitch.exchange import answer, beats, refuse_all
from killswitch.latchbook import LatchBook
from killswitch.page import StopPage, read_deadline_ms
from killswitch.runs import State
from killswitch.store import Store
from killswitch.supervisor import Supervisor
from sandbox.cgroup import Group, own_tree
from tests.killswitch.host import wait_for
from tests.killswitch.site import Site, key

pytestmark = pytest.mark.root


def launch(site: Site, *args: Any, **over: Any) -> Signed:
    return Signed.from_json(site.launch(*args, **over))


def carry(sup: Supervisor, site: Site, **over: Any) -> dict[str, Any]:
    return answer(sup, site.answer(beats(sup), **over))


class Init:
    """A process in the group that plays run init; the test holds the reading end of its pipe."""

    def __init__(self, sup: Supervisor, run: str = "run_1", attempt: int = 1, *, join: bool = True) -> None:
        group = sup.runs[f"{run}.{attempt}"].target.group
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ctypes.CDLL(None).prctl(1, 9)  # dies with the test, whatever happens to the test
            os.close(writing)
            if join:
                for path in group.procs_files():
                    Path(path).write_text(str(os.getpid()))
            while True:
                time.sleep(1)
        if join:
            wait_for(lambda: self.pid in group.pids())
        self.pidfd = os.pidfd_open(self.pid)
        os.set_blocking(self.reading, False)
        self.fds = [os.dup(self.pidfd), writing]

    def said(self) -> bytes | None:
        """Return what came down the pipe; None while nothing did, b"" at its end."""
        try:
            return os.read(self.reading, 16)
        except BlockingIOError:
            return None

    def reap(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        os.close(self.reading)


def live(sup: Supervisor, site: Site, **over: Any) -> Init:
    admit(sup, launch(site, **over))
    init = Init(sup)
    spawned(sup, "run_1.1", init.fds)
    asked = beats(sup)
    lease = site.lease(asked["beats"][0], duration_ms=over.get("lease_ms", 10_000))
    answer(sup, site.answer(asked, leases=[lease]))
    assert init.said() == b"G"
    return init


def test_G16_no_admission_until_a_snapshot_answered_our_nonce(sup: Supervisor, site: Site) -> None:
    sup.store.forget_complete()
    with pytest.raises(Stale) as caught:
        admit(sup, launch(site))
    assert caught.value.code == "stale.incomplete"
    asked = beats(sup)
    for bad in (site.snapshot("other"), site.snapshot(asked["nonce"], signer=site.grant)):
        answer(sup, site.answer(asked, stops=bad))
        assert not sup.store.complete
    again = beats(sup)
    answer(sup, site.answer(again, stops=site.snapshot(asked["nonce"])))
    assert not sup.store.complete
    carry(sup, site)
    assert admit(sup, launch(site))["run"] == "run_1"


def test_a_snapshot_brings_stops_and_lifts_none(sup: Supervisor, site: Site) -> None:
    known = site.stop_order("run:run_9")
    sup.take(known)
    other = sign(STOP, {**known.body(), "id": "stop_elsewhere", "scope": {"kind": "run", "id": "run_1"}}, key())
    carried = carry(sup, site, stops=None)
    assert carried["snapshot"] is False
    asked = beats(sup)
    answer(sup, site.answer(asked, stops=site.snapshot(asked["nonce"], [other.as_json()], [known.body()["id"]])))
    assert set(sup.state.stops) == {known.body()["id"], "stop_elsewhere"}


@pytest.mark.parametrize(
    ("over", "code"),
    [
        ({"signer": key()}, "untrusted.signature"), ({"labels": Site(node="b").labels()}, "untrusted.node"),
        ({"lease_ms": 10_001}, "denied.lease"), ({"absent_ms": 10_001}, "denied.lease"),
        ({"labels": replace(Site().labels(), run="run_x")}, "malformed"),
    ],
)
def test_refuses_when_a_launch_order_is_off(sup: Supervisor, site: Site, over: dict[str, Any], code: str) -> None:
    with pytest.raises(Refusal) as caught:
        admit(sup, launch(site, **over))
    assert caught.value.code == code
    assert admit(sup, launch(site))["attempt"] == 1


def test_refuses_when_the_attempt_was_used(sup: Supervisor, site: Site) -> None:
    admit(sup, launch(site))
    with pytest.raises(Conflict):
        admit(sup, launch(site))
    assert ended(sup, "run_1.1")["result"] == "confirmed"
    with pytest.raises(Conflict):
        admit(sup, launch(site))
    assert admit(sup, launch(site, attempt=2))["attempt"] == 2


def test_refuses_when_the_control_plane_was_not_heard_lately(sup: Supervisor, site: Site) -> None:
    sup.heard_ms = boottime_ms() - 10_001
    with pytest.raises(Stale) as caught:
        admit(sup, launch(site))
    assert caught.value.code == "stale.absent"
    assert admit(sup, launch(site, labels=site.labels(tier=Tier.NONE), lease_ms=60_000))


def test_refuses_when_the_permission_is_older_than_the_floor(sup: Supervisor, site: Site) -> None:
    early = launch(site)
    id_ = sup.stop_here("run:run_1", "")
    sup.take(site.resume([id_]))
    with pytest.raises(Halted) as caught:
        admit(sup, early)
    assert caught.value.code == "stopped.epoch"
    assert admit(sup, launch(site))


def test_refuses_when_labels_of_another_tier_are_smuggled_in(sup: Supervisor, site: Site) -> None:
    body = Signed.from_json(site.launch()).body()
    body["plan"]["tier"] = "none"
    with pytest.raises(Untrusted) as caught:
        admit(sup, sign("interlock/grant/v1", body, site.grant))
    assert caught.value.code == "untrusted.tier"
    assert admit(sup, launch(site))


def test_G12_no_GO_after_a_stop_that_came_during_the_start(sup: Supervisor, site: Site) -> None:
    admit(sup, launch(site))
    init = Init(sup)
    spawned(sup, "run_1.1", init.fds)
    asked = beats(sup)
    # What the second look must catch: a stop that is latched while the run itself was not yet ended.
    sup.state.apply_stop(StopOrder.from_json(site.stop_order("run:run_1").body()))
    answer(sup, site.answer(asked))
    run = sup.runs["run_1.1"]
    go(sup, run)
    assert (init.said(), run.state) == (None, State.BLOCKED)
    sup.state.stops.clear()
    go(sup, run)
    assert (init.said(), run.state) == (b"G", State.LIVE)
    init.reap()


def test_GO_comes_only_after_a_lease_for_the_open_nonce(sup: Supervisor, site: Site) -> None:
    admit(sup, launch(site))
    asked = beats(sup)
    init = Init(sup)
    assert spawned(sup, "run_1.1", init.fds) == {"state": "blocked"}
    assert init.said() is None
    beats(sup)
    done = answer(sup, site.answer(asked))  # the earlier nonce is void
    assert [e["code"] for e in done["errors"]] == ["stale.nonce", "stale.nonce"]
    assert init.said() is None
    carry(sup, site)
    assert init.said() == b"G"
    carry(sup, site)
    assert init.said() is None
    init.reap()


def test_refuses_when_a_lease_is_off(sup: Supervisor, site: Site) -> None:
    init = live(sup, site)
    before = read_deadline_ms(sup.runtime / "deadlines" / "run_1.1")
    time.sleep(0.01)
    for over in ({"signer": site.stop}, {"node": "b"}, {"duration_ms": 10_001}, {"attempt": 2}, {"nonce": "x"},
                 {"epoch": 0} if sup.state.top > 0 else {"run": "run_2"}):
        asked = beats(sup)
        done = answer(sup, site.answer(asked, leases=[site.lease(asked["beats"][0], **over)]))
        assert done["leases"] == 0, over
    assert read_deadline_ms(sup.runtime / "deadlines" / "run_1.1") == before
    carry(sup, site)
    assert read_deadline_ms(sup.runtime / "deadlines" / "run_1.1") > before
    init.reap()


def test_G13_a_delayed_answer_extends_only_from_its_sending(sup: Supervisor, site: Site) -> None:
    init = live(sup, site)
    asked = beats(sup)
    sent = boottime_ms()
    time.sleep(0.3)
    answer(sup, site.answer(asked))
    assert sent + 9_900 <= read_deadline_ms(sup.runtime / "deadlines" / "run_1.1") <= sent + 10_000
    init.reap()


def test_G11_a_run_that_is_never_spawned_ends_by_its_lease(sup: Supervisor, site: Site) -> None:
    admit(sup, launch(site, lease_ms=200, absent_ms=200))
    group = sup.runs["run_1.1"].target.group
    time.sleep(0.25)
    sup.tick()
    assert sup.await_gone(sup.runs["run_1.1"]) is Result.CONFIRMED
    assert sup.runs["run_1.1"].why == "lease"
    assert not group.exists()


def test_G14_a_stop_removes_the_group_of_an_admitted_run(sup: Supervisor, site: Site) -> None:
    admitted = admit(sup, launch(site))
    id_ = sup.stop_here("run:run_1", "")
    wait_for(lambda: sup.effects[id_].result is not None)
    assert sup.effects[id_].result is Result.CONFIRMED
    assert not any(os.path.isdir(p) for p in admitted["groups"].values())
    with pytest.raises(Halted):
        spawned(sup, "run_1.1", [])
    receipt = sup.effects[id_].receipt(sup.store.key, sup.node, sup.boot_id, "")
    public = sup.store.key.public_key()
    body = verify(receipt, RECEIPT, {key_id(public): public})
    assert (body["result"], body["runs"]) == ("confirmed", [{"run": "run_1", "attempt": 1}])


def test_refuses_when_run_init_is_not_in_its_group(sup: Supervisor, site: Site) -> None:
    admit(sup, launch(site))
    init = Init(sup, join=False)
    with pytest.raises(Untrusted):
        spawned(sup, "run_1.1", init.fds)
    assert init.said() == b""
    init.reap()
    admit(sup, launch(site, "run_2"))
    with pytest.raises(Malformed):
        spawned(sup, "run_2.1", [])
    good = Init(sup, "run_2")
    assert spawned(sup, "run_2.1", good.fds) == {"state": "blocked"}
    good.reap()


def test_G1_a_stop_of_an_old_epoch_is_applied(sup: Supervisor, site: Site) -> None:
    sup.take(site.stop_order("tenant:other", epoch=500))
    admit(sup, launch(site))
    id_, applied = sup.take(site.stop_order("run:run_1", epoch=0))
    assert applied
    wait_for(lambda: sup.effects[id_].result is Result.CONFIRMED)
    assert sup.runs["run_1.1"].why == f"order:{id_}"
    assert sup.take(site.stop_order("run:run_1", id=id_, epoch=0)) == (id_, False)


def test_G2_a_resume_lifts_only_the_stops_that_it_names(sup: Supervisor, site: Site) -> None:
    one, two = sup.stop_here("everything", ""), sup.stop_here("run:run_1", "")
    resume = site.resume([one])
    assert sup.take(resume)[1]
    assert set(sup.state.stops) == {two}
    assert sup.take(resume)[1] is False
    with pytest.raises(Halted):
        admit(sup, launch(site))
    assert admit(sup, launch(site, "run_2"))["run"] == "run_2"


def test_G3_a_resumed_latch_file_does_not_stop_again(sup: Supervisor, site: Site) -> None:
    (sup.store.latch / "STOP").touch()
    for _ in range(3):
        sup.look()
    assert len(sup.state.stops) == 1
    id_ = next(iter(sup.state.stops))
    sup.take(site.resume([id_]))
    assert not (sup.store.latch / "STOP").exists()
    sup.look()
    assert not sup.state.stops
    (sup.store.latch / "STOP").touch()
    sup.look()
    assert len(sup.state.stops) == 1


def test_a_cleared_latch_file_stays_without_effect_where_it_cannot_be_renamed(
    sup: Supervisor, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sup.store.latch / "STOP").touch()
    sup.look()
    monkeypatch.setattr(room.latch, "retire", lambda *a: None)
    sup.take(site.resume(list(sup.state.stops)))
    assert (sup.store.latch / "STOP").exists()
    for _ in range(3):
        sup.look()
    assert not sup.state.stops


def test_G10_local_stops_go_up_until_acknowledged_and_a_resume_can_name_them(sup: Supervisor, site: Site) -> None:
    id_ = sup.stop_here("everything", "smoke")
    asked = beats(sup)
    public = sup.store.key.public_key()
    bodies = [verify(Signed.from_json(o), STOP, {key_id(public): public}) for o in asked["orders"]]
    assert [(b["id"], b["scope"]["kind"], b["actor"]) for b in bodies] == [(id_, "node", "local@node-a")]
    assert [Signed.from_json(r).body()["order"] for r in asked["receipts"]] == [id_]
    carry(sup, site, acked=[id_], receipts_acked=[id_])
    asked = beats(sup)
    assert (asked["orders"], asked["receipts"]) == ([], [])
    carry(sup, site, orders=[site.resume([id_]).as_json()])
    assert not sup.state.stops


def test_a_resume_and_its_stop_may_travel_in_any_order(sup: Supervisor, site: Site) -> None:
    stop = site.stop_order()
    resume = site.resume([stop.body()["id"]])
    done = carry(sup, site, orders=[resume.as_json(), stop.as_json(), {"junk": 1}])
    assert (done["orders"], len(done["errors"])) == (2, 1)
    assert not sup.state.stops
    assert sup.take(stop) == (stop.body()["id"], False)


def test_G15_a_restart_reads_no_lease_back_and_attempts_stay_used(sup: Supervisor, site: Site) -> None:
    init = live(sup, site)
    entry = sup.books["run_1.1"]
    init.reap()
    ended(sup, "run_1.1")
    sup.store.update(replace(entry, boot_id="another"))
    sup.close()
    again = Supervisor(sup.store.folder.parent, sup.runtime, [])
    again.start()
    assert again.runs == {}
    assert again.books["run_1.1"].closed == "start"
    carry(again, site)
    with pytest.raises(Conflict):
        admit(again, launch(site))
    again.close()


def test_G15_a_restart_from_another_control_group_ends_what_lies_in_the_earlier_tree(
    sup: Supervisor, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = live(sup, site)
    group = sup.runs["run_1.1"].target.group
    (sup.store.runs / "run_1.1.json").write_text("{")  # its own books do not say where it lies any more
    sup.runs.clear()  # it crashed
    fcntl.flock(sup.store._lock, fcntl.LOCK_UN)  # init of this test holds a copy of the descriptor
    monkeypatch.setattr(room, "own_tree", lambda name: own_tree(f"{name}-b"))
    again = Supervisor(sup.store.folder.parent, sup.runtime, [])
    assert init.pid in group.pids()
    again.start()
    assert not group.exists()
    assert again.runs["run_1.1"].why == "start"
    init.reap()
    again.close()


def test_G17_a_stop_is_on_disk_before_anything_is_killed(
    sup: Supervisor, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit(sup, launch(site))
    seen: list[int] = []
    real = Group.kill

    def spy(group: Group) -> None:
        seen.append(len(list((sup.store.folder / "orders").glob("*.stop"))))
        real(group)

    monkeypatch.setattr(Group, "kill", spy)
    id_ = sup.stop_here("everything", "")
    wait_for(lambda: sup.effects[id_].result is Result.CONFIRMED)
    assert seen
    assert set(seen) == {1}
    sup.store.close()
    again = Store(sup.store.folder)
    assert set(again.load("node-a")[0].stops) == {id_}
    again.close()


def test_a_stop_that_cannot_be_latched_acts_but_is_not_confirmed(
    sup: Supervisor, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: LatchBook, item: object) -> None:
        raise OSError(28, "No space left on device")

    init = live(sup, site)
    with monkeypatch.context() as patch:
        patch.setattr(LatchBook, "latch_stop", full)
        id_ = sup.stop_here("run:run_1", "")
        sup.await_gone(sup.runs["run_1.1"])
        assert (sup.effects[id_].result, sup.effects[id_].why) == (Result.NOT_CONFIRMED, "not durable")
        assert not sup.store.complete
    init.reap()
    sup.look()
    sup.tick()
    assert sup.effects[id_].result is Result.CONFIRMED


def test_refuses_when_a_group_on_the_books_is_gone(sup: Supervisor, site: Site) -> None:
    admit(sup, launch(site))
    sup.runs["run_1.1"].target.group.remove()
    id_ = sup.stop_here("run:run_1", "")
    wait_for(lambda: sup.effects[id_].result is not None)
    effect = sup.effects[id_]
    assert (effect.result, effect.why) == (Result.NOT_CONFIRMED, "the control group is not there")
    assert sup.runs["run_1.1"].state is State.KILLING
    sup.runs["run_1.1"].removed = True  # a person looked and says so: the fixture ends clean
    wait_for(lambda: effect.result is Result.CONFIRMED)


def test_a_group_that_nobody_admitted_is_ended(sup: Supervisor, site: Site) -> None:
    from sandbox.cgroup import Limits

    admit(sup, launch(site))
    alien = sup.tree.create("run_7.3", Limits(10, 64))
    id_ = sup.stop_here("run:run_8", "")
    wait_for(lambda: sup.effects[id_].result is not None)
    assert not alien.exists()
    assert sup.effects[id_].as_json()["runs"] == [{"run": "run_7", "attempt": 3}]
    assert sup.runs["run_1.1"].state is State.ADMITTED


def test_REFUSED_ends_renewal_at_once(sup: Supervisor, site: Site) -> None:
    init = live(sup, site, labels=site.labels(tier=Tier.NONE), lease_ms=2_000, absent_ms=60_000)
    time.sleep(1.05)
    sup.tick()
    assert sup.runs["run_1.1"].leash is not None
    assert sup.runs["run_1.1"].leash.deadline_ms > boottime_ms() + 1_000  # bridged
    refuse_all(sup)
    assert beats(sup)["beats"] == []
    time.sleep(1.0)
    sup.tick()
    assert sup.runs["run_1.1"].why == "lease"
    assert sup.await_gone(sup.runs["run_1.1"]) is Result.CONFIRMED
    init.reap()


def test_a_refusal_in_an_answer_counts_whatever_its_nonce(sup: Supervisor, site: Site) -> None:
    init = live(sup, site)
    carry(sup, site, leases=[], refused=[{"nonce": "old", "run": "run_1", "attempt": 1, "code": "stopped"}])
    leash = sup.runs["run_1.1"].leash
    assert leash is not None
    assert leash.refused
    init.reap()


def test_an_init_that_exits_ends_the_attempt(sup: Supervisor, site: Site) -> None:
    init = live(sup, site)
    init.reap()
    sup.tick()
    assert sup.await_gone(sup.runs["run_1.1"]) is Result.CONFIRMED
    assert sup.runs["run_1.1"].why == "ended"
    assert not (sup.runtime / "deadlines" / "run_1.1").exists()


def test_a_run_whose_lease_is_over_ended_by_its_lease_whoever_asks_first(sup: Supervisor, site: Site) -> None:
    admit(sup, launch(site, lease_ms=100, absent_ms=100))
    admit(sup, launch(site, "run_2"))
    time.sleep(0.12)  # no tick in between
    assert ended(sup, "run_1.1")["why"] == "lease"
    assert ended(sup, "run_2.1")["why"] == "ended"  # control


def test_ended_attempts_hold_no_descriptors(sup: Supervisor, site: Site) -> None:
    def cycle(run: str) -> int:
        admit(sup, launch(site, run))
        assert ended(sup, f"{run}.1")["result"] == "confirmed"
        return len(os.listdir("/proc/self/fd"))

    first_count = cycle("run_1")
    assert [cycle(f"run_{n}") for n in range(2, 8)] == [first_count] * 6


def test_refuses_when_the_cool_down_is_not_over(sup: Supervisor, site: Site) -> None:
    assert sup.trust is not None
    id_ = sup.stop_here("everything", "")
    sup.trust = replace(sup.trust, cooldown_ms=100)
    resume = site.resume([id_])
    with pytest.raises(Denied) as caught:
        sup.take(resume)
    assert caught.value.code == "denied.cooldown"
    time.sleep(0.12)
    assert sup.take(resume)[1]


def test_refuses_when_the_owner_of_an_ended_run_resumes(sup: Supervisor, site: Site) -> None:
    admit(sup, launch(site, labels=site.labels(owner="ada")))
    assert ended(sup, "run_1.1")["result"] == "confirmed"
    id_ = sup.stop_here("run:run_1", "")
    with pytest.raises(Denied):
        sup.take(site.resume([id_], ("ada", "bela")))
    assert sup.take(site.resume([id_], ("bela", "cleo")))[1]


def test_break_glass_works_twice(sup: Supervisor, site: Site) -> None:
    one, _ = sup.take(site.right())
    sup.take(site.resume([one], ("ada", "bela")))
    assert not sup.state.stops
    two, applied = sup.take(site.right())
    assert applied
    assert one != two
    assert [s.actor for s in sup.state.stops.values()] == ["otto"]
    assert Signed.from_json(beats(sup)["orders"][-1]).body()["id"] == two


def test_the_stop_page_follows_each_change(sup: Supervisor, site: Site) -> None:
    page = StopPage(sup.runtime / "stop-page", sup.runtime / "stop-state.json")
    assert page.stopped(site.labels()) is None
    before = page.epoch()
    id_ = sup.stop_here("everything", "")
    found = page.stopped(site.labels())
    assert found is not None
    assert found.id == id_
    sup.take(site.resume([id_]))
    assert page.stopped(site.labels()) is None
    assert page.epoch() == before + 2


def test_trust_changes_by_the_wire_only_by_the_rule(sup: Supervisor, site: Site) -> None:
    done = carry(sup, site, trust=sign("interlock/trust/v1", site.trust_body(version=2), key()).as_json())
    assert done["errors"][0]["code"].startswith("untrusted")
    done = carry(sup, site, trust=site.trust(version=2).as_json())
    assert done["trust"]
    assert beats(sup)["trust_version"] == 2
    again = Supervisor.__new__(Supervisor)
    assert again is not sup
    assert room.load(sup.store.folder / "trust.json") == sup.trust


def test_before_the_join_it_stops_and_admits_nothing(sup: Supervisor, site: Site) -> None:
    trust = (sup.store.folder / "trust.json").read_bytes()
    (sup.store.folder / "trust.json").unlink()
    sup.trust = None
    with pytest.raises(Unavailable):
        admit(sup, launch(site))
    done = carry(sup, site, trust=site.trust(version=3).as_json())
    assert sup.trust is None
    assert done["errors"]
    sup.stop_here("everything", "")
    (sup.store.folder / "trust.json").write_bytes(trust)
    (sup.store.folder / "trust.json").chmod(0o600)
    sup.look()
    assert sup.state.stopped(site.labels()) is not None
    with pytest.raises(Halted):
        admit(sup, launch(site))
