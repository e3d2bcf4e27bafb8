"""Stops seen from the node: proof, no restart, no collecting, and the third watcher."""

import os
import signal
import subprocess
import time

import pytest

from interlock.order import LaunchOrder
from interlock.signed import RECEIPT, public_from_text
from killswitch.client import Supervisor
from runners.deadline import LOOK_S, Watched, Watcher, passed
from sandbox.cgroup import Group, Limits, own_tree
from sandbox.trial import put_down, write_page
from tests.runners.conftest import needs_root
from tests.runners.programs import Lab, groups_of
from tests.runners.simulator import verified

pytestmark = [pytest.mark.root, needs_root]

HOSTILE = (
    "trap '' TERM INT HUP; mkdir out; echo secret > out/taken.txt;"
    "(setsid sh -c 'sleep 1000 & sleep 1000' &) ; (sh -c '(sleep 1000 &) ; sleep 1000' &); echo up; sleep 1000"
)


def _hostile(lab: Lab, **plan: object) -> LaunchOrder:
    made = lab.launch("sh", "-c", HOSTILE, restarts=3, **plan)
    lab.live(made)
    lab.site.wait_for(lambda: "up" in lab.said(made))
    assert len(lab.pids(made)) >= 4  # alive before the stop, so its death proves something
    return made


def test_a_stop_is_confirmed_and_the_restart_is_refused(own_lab: Lab):
    lab = own_lab
    made = _hostile(lab)
    order = lab.site.stop_order(f"run:{made.run}")
    outcome = lab.ended(made)
    assert (outcome["result"], outcome["why"]) == ("confirmed", f"order:{order.id}")
    assert (outcome["exit"], outcome["signal"]) == (None, None)
    assert lab.pids(made) == []
    assert not any(name.startswith(made.run) for name in lab.site.files)  # a stopped run hands out nothing
    receipt = lab.site.wait_for(lambda: next((r for r in lab.site.receipts if r.body()["order"] == order.id), None))
    key = public_from_text(lab.site.supervisor_key)
    assert verified(receipt, RECEIPT, key)["result"] == "confirmed"
    again = lab.launch("sh", "-c", HOSTILE, run=made.run, attempt=2, restarts=3)
    final = lab.over(again)
    assert final["state"] == "refused"
    assert final["error"]["code"].startswith("stopped")
    denied = lab.site.wait_for(lambda: next(
        (e for e in lab.site.events() if e["type"] == "gate.decided" and e["run"] == made.run
         and e["facts"]["decision"]["code"] == "stopped"), None))  # the node's own gate said it, and said it on record
    assert denied["facts"]["decision"]["rules"] == [f"stop:{order.id}"]
    other = lab.launch("true")  # control: what the stop does not cover still runs
    assert lab.ended(other)["exit"] == 0


def test_a_local_stop_needs_no_control_plane(own_lab: Lab):
    lab = own_lab
    made = _hostile(lab)
    lab.simulator.away()
    id_ = Supervisor(lab.host.socket).ask("stop", scope="everything", reason="a test")["id"]
    until = time.monotonic() + 5
    while Supervisor(lab.host.socket).ask("receipts", order=id_)["result"] != "confirmed":
        assert time.monotonic() < until
        time.sleep(0.02)
    assert lab.pids(made) == []
    lab.simulator.back()
    assert lab.ended(made)["why"] == f"order:{id_}"  # told as soon as somebody listens again


def test_a_run_dies_with_its_node_and_the_next_node_says_so(own_lab: Lab):
    lab = own_lab
    made = _hostile(lab)
    pids = lab.pids(made)
    assert lab.node is not None
    lab.node.end(signal.SIGKILL)
    until = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{p}") for p in pids):
        assert time.monotonic() < until
        time.sleep(0.02)
    lab.start_node()
    assert lab.ended(made)["why"] == "node_restarted"
    assert "up" in lab.said(made)
    assert not lab.host.run(made.run, 1).exists()
    assert f"{made.run}.1" not in open_mounts()
    lab.site.states.clear()  # handed out once more: the id is on disk
    assert lab.over(made)["error"]["code"] == "conflict.launch_order_used"


def open_mounts() -> str:
    with open("/proc/self/mounts") as rows:
        return rows.read()


def test_G18_the_node_ends_a_frozen_run_whose_supervisor_hangs(own_lab: Lab):
    lab = own_lab
    made = _hostile(lab, lease_ms=2_000)
    group = Group(f"{made.run}.1", groups_of(lab.host, made))
    pids = group.pids()
    assert lab.supervisor is not None
    lab.supervisor.process.send_signal(signal.SIGSTOP)  # it neither renews nor kills
    try:
        group.freeze()  # run init does not count any more
        began = time.monotonic()
        while any(_runs(p) for p in pids):
            assert time.monotonic() - began < 2.0 + 2.0
            time.sleep(0.02)
    finally:
        lab.supervisor.process.send_signal(signal.SIGCONT)
    assert lab.ended(made)["result"] == "confirmed"


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as row:
            return row.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.fixture
def frozen(short):
    """A process in a group of its own that is frozen, and a page for it."""
    tree = own_tree(f"h3w{os.getpid()}")
    group = tree.create("w.1", Limits(16, 64, None))
    process = subprocess.Popen(["sleep", "300"])
    for path in group.procs_files():
        with open(path, "w") as file:
            file.write(str(process.pid))
    group.freeze()
    pidfd = os.pidfd_open(process.pid)
    yield process, group, pidfd, short / "page"
    put_down(group)
    process.wait()
    tree.remove()


def test_G18_watcher_thaws_and_kills_after_the_deadline_only(frozen):
    process, group, pidfd, page = frozen
    write_page(page, 0.6)
    watcher = Watcher()
    watcher.watch("w", 1, Watched(page, group.thaw, pidfd))
    watcher.start()
    time.sleep(0.3)
    assert process.poll() is None  # control: before the deadline nothing happens
    assert process.wait(2) == -signal.SIGKILL
    assert watcher.forget("w", 1) is True
    watcher.end()


def test_G18_an_unreadable_page_counts_as_passed(short):
    page = short / "page"
    assert passed(page)
    write_page(page, 60)
    assert not passed(page)  # control
    good = page.read_bytes()
    for bad in (b"", good[:20], b"X" + good[1:], good[:16] + b"\0" * 16 + good[32:]):
        page.chmod(0o644)
        page.write_bytes(bad)
        assert passed(page)
    write_page(page, -1)
    assert passed(page)
    assert LOOK_S <= 0.1
