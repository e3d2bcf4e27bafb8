"""Rows of the fail-closed matrix with supervisor, node and real sandboxes: who dies, who hangs, what is full."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from killswitch.client import Supervisor
from killswitch.verify import state_of, uid_of
from tests.killswitch.host import wait_for
from tests.runners.programs import Lab, code, groups_of, supervisor

pytestmark = pytest.mark.root

HOSTILE = (
    "trap '' TERM INT HUP; (setsid sh -c 'sleep 1000 & sleep 1000' &); (sh -c '(sleep 1000 &); sleep 1000' &);"
    "echo up; sleep 1000"
)


def lives(pids: list[int]) -> list[int]:
    return [p for p in pids if state_of(p) not in ("", "Z", "X")]


def hostile(lab: Lab, command: str = HOSTILE, **plan: object) -> tuple[object, list[int]]:
    made = lab.launch("sh", "-c", command, **plan)
    lab.live(made)
    lab.site.wait_for(lambda: "up" in lab.said(made))
    pids = lab.pids(made)
    assert len(lives(pids)) >= 4
    return made, pids


def dead_within(pids: list[int], seconds: float) -> None:
    began = time.monotonic()
    while lives(pids):
        assert time.monotonic() - began < seconds, lives(pids)
        time.sleep(0.02)


def test_both_programs_killed_the_run_dies_by_its_pipes(lab: Lab):
    made, pids = hostile(lab)
    lab.supervisor.end(signal.SIGKILL)  # first: else it might take the group away and die before it says so
    lab.node.end(signal.SIGKILL)
    dead_within(pids, 2.0)
    where = ["--state", str(lab.host.state), "--runtime", str(lab.host.runtime)]
    done = subprocess.run([sys.executable, "-I", "-m", "killswitch", "stop", "--all", "--json", *where],
                          capture_output=True, text=True, timeout=20, check=False, cwd="/")
    assert json.loads(done.stdout)["result"] == "confirmed"
    lab.supervisor = supervisor(lab.host)
    lab.start_node()
    # The node may have seen the run die, and no supervisor, in the moment before it was killed itself.
    assert lab.ended(made)["why"] in ("node_restarted", "unavailable.supervisor")
    assert not [row for row in Path("/proc/mounts").read_text().splitlines() if str(lab.host.runtime) in row]


def test_both_programs_hung_the_run_dies_by_its_own_count(lab: Lab):
    made, pids = hostile(lab, lease_ms=2_000)
    both = (lab.node.process, lab.supervisor.process)
    for process in both:
        process.send_signal(signal.SIGSTOP)
    try:
        dead_within(pids, 2.0 + 2.0)
    finally:
        for process in both:
            process.send_signal(signal.SIGCONT)
    outcome = lab.ended(made)
    assert (outcome["result"], outcome["timed_out"]) == ("confirmed", True)


def test_a_node_that_hangs_holds_no_stop_back(lab: Lab):
    made, pids = hostile(lab)
    lab.node.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        order = lab.site.stop_order(f"run:{made.run}")
        lab.site.wait_for(lambda: [r for r in lab.site.receipts if r.body()["order"] == order.id
                                   and r.body()["result"] == "confirmed"], 5.0)
        assert time.monotonic() - began < 5.0
        assert not lives(pids)
    finally:
        lab.node.process.send_signal(signal.SIGCONT)
    assert lab.ended(made)["why"] == f"order:{order.id}"


def test_a_replayed_launch_order_starts_nothing_after_a_stop_and_a_restart(lab: Lab):
    made, pids = hostile(lab)
    lab.site.stop_order(f"run:{made.run}")
    assert lab.ended(made)["result"] == "confirmed"
    assert not lives(pids)
    lab.node.end(signal.SIGKILL)
    lab.supervisor.end(signal.SIGKILL)
    # The worst replay: the node's own memory of the order is gone as well.
    for path in (lab.host.node / "used-orders").iterdir():
        path.unlink()
    lab.supervisor = supervisor(lab.host)
    lab.site.states.clear()
    lab.start_node()
    assert lab.over(made)["state"] == "refused"
    with pytest.raises(Exception, match="stop"):
        Supervisor(lab.host.socket).ask("admit", launch=lab.site.launches[-1].as_json())


def test_refuses_when_a_restarted_node_calls_a_run_dead_that_is_not_proven(lab: Lab):
    made, pids = hostile(lab)
    uid = next(u for p in pids if (u := uid_of(p)))
    # A survivor outside the group, under the run's uid: nothing we may kill, so nothing we may claim.
    sleeper = f"import os, time; os.setresuid({uid}, {uid}, {uid}); time.sleep(120)"
    outside = subprocess.Popen([sys.executable, "-I", "-S", "-c", sleeper])
    try:
        wait_for(lambda: f"Uid:\t{uid}\t" in Path(f"/proc/{outside.pid}/status").read_text())
        lab.node.end(signal.SIGKILL)
        dead_within(pids, 2.0)
        lab.start_node()
        outcome = lab.ended(made)
        assert (outcome["why"], outcome["result"]) == ("node_restarted", "not_confirmed")
    finally:
        outside.kill()
        outside.wait()
    client = Supervisor(lab.host.socket)
    lab.site.wait_for(lambda: all(r["state"] == "gone" for r in client.ask("status")["runs"]))
    lab.node.end()
    lab.start_node()  # what the unproven run kept mounted goes now
    assert not [row for row in Path("/proc/mounts").read_text().splitlines() if str(lab.host.runtime) in row]


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Cover `folder` by a file system without a free block or inode."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"t", str(folder).encode(), b"tmpfs", 0, b"size=64k,mode=0700,nr_inodes=64") == 0
    filler = folder / "filler"
    try:
        with suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        with suppress(OSError):
            for n in range(64):
                (folder / f".i{n}").touch()
        yield
    finally:
        assert libc.umount2(str(folder).encode(), 2) == 0


def test_a_full_disk_at_the_node_refuses_in_words_and_heals(calm: Lab):
    lab = calm
    for name in ("used-orders", "work"):
        with full(lab.host.node / name):
            made = lab.launch("true")
            final = lab.over(made)
            assert (final["state"], final["error"]["code"]) == ("refused", "unavailable.disk")
        assert lab.ended(lab.launch("true"))["exit"] == 0  # the node goes on as soon as there is room


def test_a_disk_that_fills_while_a_run_lives_costs_output_not_the_report(calm: Lab):
    lab = calm
    made = lab.launch("sh", "-c", "echo up; sleep 1; mkdir out; echo x > out/f; seq 200000; exit 3")
    lab.live(made)
    lab.site.wait_for(lambda: "up" in lab.said(made))
    folder = lab.host.node / "work" / f"{made.run}.1"
    with full(folder):
        outcome = lab.ended(made)
        assert (outcome["exit"], outcome["result"]) == (3, "confirmed")


def test_thirty_quick_runs_leave_nothing(calm: Lab):
    lab = calm
    before = {p for p in os.listdir("/proc") if p.isdigit() and state_of(int(p)) == "Z"}
    made = [lab.launch("sh", "-c", "(sleep 100 &) ; exit 0", code=code(lab.site, "x.py", f"# {n}")) for n in range(30)]
    for one in made:
        assert lab.ended(one, 40)["result"] == "confirmed"
    lab.site.wait_for(lambda: not any((lab.host.node / "work" / f"{one.run}.1").exists() for one in made))
    runtime = str(lab.host.runtime)
    assert not [row for row in Path("/proc/mounts").read_text().splitlines() if runtime in row]
    assert list((lab.host.runtime / "runs").iterdir()) == []
    assert list((lab.host.runtime / "deadlines").iterdir()) == []
    assert not [p for one in made for p in groups_of(lab.host, one).values() if os.path.exists(p)]
    kept = {d.removeprefix("sha256:") for one in made for _, d in one.plan.code}
    lab.site.wait_for(lambda: not kept & set(os.listdir(lab.host.node / "code")))
    ours = {str(p.ready["pid"]) for p in (lab.node, lab.supervisor)}
    zombies = [p for p in os.listdir("/proc") if p.isdigit() and p not in before and state_of(int(p)) == "Z"]
    assert not [z for z in zombies if parent(z) in ours]
    for program in (lab.node, lab.supervisor):
        assert len(os.listdir(f"/proc/{program.ready['pid']}/fd")) < 40
        assert len(os.listdir(f"/proc/{program.ready['pid']}/task")) < 20


def parent(pid: str) -> str:
    try:
        return next(x.split()[1] for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("PPid"))
    except (OSError, StopIteration):
        return ""


FLOOD = (
    "import os, sys, threading\n"
    "print('up', flush=True)\n"
    "for _ in range(200):\n"
    "    try:\n"
    "        if os.fork() == 0:\n"
    "            os.setsid()\n"
    "            break\n"
    "    except OSError: pass\n"
    "try:\n"
    "    with open(f'/work/{os.getpid()}', 'wb') as f:\n"
    "        while True: f.write(b'x' * 65536)\n"
    "except OSError: pass\n"
    "while True:\n"
    "    try:\n"
    "        os.write(1, b'y' * 65536)\n"
    "        os.fork()\n"
    "    except OSError: pass\n"
)


def test_a_run_that_floods_log_disk_and_pids_is_stopped_in_time(calm: Lab):
    lab = calm
    made = lab.launch("python3", "/code/flood.py", code=code(lab.site, "flood.py", FLOOD), pids=64, work_mb=16,
                      output_mb=1, memory_mb=256)
    lab.live(made)
    lab.site.wait_for(lambda: len(lab.said(made)) > 100_000)
    pids = lab.pids(made)
    assert len(lives(pids)) >= 32
    began = time.monotonic()
    order = lab.site.stop_order(f"run:{made.run}")
    outcome = lab.ended(made)
    assert (outcome["result"], outcome["why"]) == ("confirmed", f"order:{order.id}")
    assert time.monotonic() - began < 5.0
    assert outcome["truncated_bytes"] > 0
    assert len(lab.said(made)) <= 1 << 20
    assert lab.ended(lab.launch("true"))["exit"] == 0  # control: the node is well
