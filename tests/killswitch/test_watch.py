"""The supervisor as a process: dead, hung, frozen, restarted; each run is alive before it must die."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from interlock.errors import Conflict, Halted, Malformed, Refusal, Unavailable, Usage
from killswitch.client import Supervisor
from killswitch.page import StopPage
from tests.killswitch.host import HOSTILE, Host, wait_for
from tests.killswitch.site import save

pytestmark = pytest.mark.root
SHORT = {"lease_ms": 1_500, "absent_ms": 1_500}


def test_G18_supervisor_killed_the_run_dies_by_its_pipe(host: Host) -> None:
    started = host.live(code=HOSTILE, uid=60_981)
    assert len(started.alive()) >= 2
    host.kill_supervisor()
    assert wait_for(lambda: not started.alive(), 2.0) < 2.0


def test_G18_supervisor_hung_the_run_dies_by_its_own_count(host: Host) -> None:
    started = host.live(**SHORT)
    page = StopPage(host.runtime / "stop-page", host.runtime / "stop-state.json")
    assert page.stopped(host.site.labels("run_2")) is None
    host.signal(signal.SIGSTOP)
    begin = time.monotonic()
    assert started.alive()
    wait_for(lambda: not started.alive(), 3.5)
    assert time.monotonic() - begin <= 3.5
    wait_for(lambda: getattr(page.stopped(host.site.labels("run_2")), "id", "") == "stale", 2.5)
    host.signal(signal.SIGCONT)
    wait_for(lambda: host.row()["state"] == "gone")
    assert host.row()["why"] == "lease"


@pytest.mark.parametrize("freezer", ["v1", "v2"])
def test_G18_a_frozen_run_is_ended_by_the_supervisors_count(host: Host, freezer: str) -> None:
    started = host.live(**SHORT)
    if freezer == "v1":
        if "freezer" not in started.groups:
            pytest.skip("no v1 freezer on this host")
        Path(started.groups["freezer"], "freezer.state").write_text("FROZEN")
    else:
        Path(started.groups["unified"], "cgroup.freeze").write_text("1")
    assert started.alive()
    assert wait_for(lambda: not started.alive(), 3.5) <= 3.5
    wait_for(lambda: host.row()["state"] == "gone")
    assert host.row()["why"] == "lease"


def test_a_frozen_run_is_stopped_within_two_seconds(host: Host) -> None:
    started = host.live()
    if "freezer" in started.groups:
        Path(started.groups["freezer"], "freezer.state").write_text("FROZEN")
    Path(started.groups["unified"], "cgroup.freeze").write_text("1")
    assert started.alive()
    begin = time.monotonic()
    status, found = host.stop("--run", "run_1")
    assert (status, found["result"]) == (0, "confirmed")
    assert time.monotonic() - begin < 2
    assert not started.alive()


def test_stop_works_while_the_supervisor_hangs(host: Host) -> None:
    started = host.live(code=HOSTILE, uid=60_982)
    host.signal(signal.SIGSTOP)
    assert len(started.alive()) >= 2
    begin = time.monotonic()
    status, found = host.stop("--all")
    assert time.monotonic() - begin < 5
    assert (status, found["result"], found["supervisor"]) == (0, "confirmed", "no answer")
    assert found["killed"] >= 2
    assert not started.alive()
    assert not any(os.path.isdir(p) for p in started.groups.values())
    host.signal(signal.SIGCONT)
    wait_for(lambda: any(s["reason"] == "latch file STOP" for s in host.ask("status")["stops"]))
    order = next(s["id"] for s in host.ask("status")["stops"] if s["reason"] == "latch file STOP")
    wait_for(lambda: host.ask("receipts", order=order)["result"] == "confirmed")


def test_stop_works_while_the_supervisor_is_dead_and_sticks(host: Host) -> None:
    started = host.live()
    # The run must outlive the supervisor for this: somebody else holds its pipe, its deadline is far.
    assert started.alive()
    host.kill_supervisor()
    status, found = host.stop("--run", "run_1")
    assert (status, found["result"], found["by"]) == (0, "confirmed", "direct")
    host.watch()
    host.beat()
    with pytest.raises(Halted):
        host.admit("run_1", 2)
    assert host.admit("run_2")["run"] == "run_2"


def test_a_restart_ends_every_run_before_it_serves_and_keeps_the_stops(host: Host) -> None:
    started = host.live()
    host.ask("stop", scope="run:run_5", reason="")
    host.signal(signal.SIGSTOP)
    assert started.alive()
    host.kill_supervisor()
    host.watch()
    assert not started.alive()
    assert not any(os.path.isdir(p) for p in started.groups.values())
    assert [s["scope"] for s in host.ask("status")["stops"]] == [{"kind": "run", "id": "run_5"}]
    assert list((host.runtime / "deadlines").iterdir()) == []
    host.beat()
    with pytest.raises(Conflict):
        host.admit("run_1", 1)
    assert host.admit("run_1", 2)["attempt"] == 2


def test_a_lease_that_is_held_or_replayed_extends_nothing(host: Host) -> None:
    started = host.live(**SHORT)
    asked = host.ask("beats")
    held = host.site.answer(asked, leases=[host.site.lease(asked["beats"][0], duration_ms=1_500)])
    deadline = host.row()["deadline_ms"]
    time.sleep(1.0)
    for _ in range(3):
        host.ask("answer", answer=held)
    assert host.row()["deadline_ms"] <= deadline + 1_000
    assert started.alive()
    wait_for(lambda: not started.alive(), 3.5)
    for _ in range(3):
        host.ask("answer", answer=held)
    wait_for(lambda: host.row()["state"] == "gone")


def test_the_wall_clock_is_never_read(host: Host) -> None:
    sources = [p for p in Path("killswitch").glob("*.py")]
    assert len(sources) > 10
    for path in sources:
        text = path.read_text()
        for word in ("time.time(", "time.time_ns(", "datetime", "CLOCK_REALTIME"):
            assert word not in text, (path, word)


def test_a_latch_file_stops_at_once(host: Host) -> None:
    started = host.live()
    assert started.alive()
    (host.state / "supervisor" / "latch" / "STOP-run_1").touch()
    assert wait_for(lambda: not started.alive(), 2.0) < 2.0
    stop = host.ask("status")["stops"][0]
    assert stop["id"].startswith("latch_")
    done = host.command("resume", str(save(host.folder / "resume", host.site.resume([stop["id"]]))), "--json")
    assert (done.returncode, json.loads(done.stdout)["applied"]) == (0, True)
    time.sleep(1.2)
    assert host.ask("status")["stops"] == []
    assert host.admit("run_1", 2)["attempt"] == 2


def test_not_confirmed_is_said_in_time_and_calls_people(host: Host) -> None:
    host.end()
    told = host.folder / "told"
    hook = host.folder / "hook.py"
    hook.write_text(f"import sys; open({str(told)!r}, 'w').write(sys.stdin.read())")
    host.watch("--on-unconfirmed", f"{sys.executable} -I -S {hook}")
    started = host.live(uid=60_983)
    # A process of the run's uid that lives outside its group: nothing we may kill, so nothing we may claim.
    code = "import os, time; os.setresuid(60983, 60983, 60983); time.sleep(60)"
    outside = subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
    try:
        wait_for(lambda: "Uid:\t60983\t" in Path(f"/proc/{outside.pid}/status").read_text())
        begin = time.monotonic()
        done = host.command("stop", "--run", "run_1", "--wait", "7", "--json")
        assert time.monotonic() - begin < 7
        found = json.loads(done.stdout)
        assert (done.returncode, found["result"], found["why"]) == (4, "not_confirmed", "uid")
        assert [s["pid"] for s in found["survivors"]] == [outside.pid]
        assert json.loads(done.stderr)["error"]["code"] == "not_confirmed"
        assert not started.alive()
        wait_for(lambda: told.exists() and told.read_text() != "")
        assert json.loads(told.read_text())["survivors"][0]["pid"] == outside.pid
        with pytest.raises(Refusal):
            host.admit("run_1", 2)
    finally:
        outside.kill()
        outside.wait()
    wait_for(lambda: host.ask("receipts", order=found["order"])["result"] == "confirmed", 8)


def test_refuses_when_it_is_started_twice(host: Host) -> None:
    for words in ((), ("--runtime", str(host.folder / "r2"))):
        done = host.command("watch", *words)
        assert done.returncode == 1
        assert json.loads(done.stderr)["error"]["code"] == "conflict.second_start"
    assert host.ask("status")["pid"] == (host.process.pid if host.process else 0)


def test_refuses_when_a_request_is_off(host: Host) -> None:
    for op, fields in (
        ("fly", {}), ("admit", {}), ("order", {"order": {"format": "x"}}),
        ("stop", {"scope": "planet:x", "reason": ""}),
        ("spawned", {"run": "run_1"}), ("answer", {"answer": []}), ("spawned", {"run": "../x", "attempt": 1}),
        ("receipts", {"order": "none"}), ("stop", {"scope": "node:elsewhere", "reason": ""}),
    ):
        with pytest.raises(Refusal):
            host.ask(op, **fields)
    with pytest.raises(Malformed):
        host.ask("status", padding="x" * 200_000)
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.connect(str(host.runtime / "supervisor.sock"))
    raw.send(b"\xff\xfe not json")
    assert json.loads(raw.recv(4096))["error"]["code"] == "malformed"
    raw.close()
    assert host.ask("status")["stops"] == []


def test_refuses_when_nobody_answers_or_the_path_is_long(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        Supervisor(tmp_path / "none.sock").ask("status")
    with pytest.raises(Usage):
        Supervisor(Path("/tmp") / ("x" * 120))


def test_ends_cleanly_and_leaves_nothing(host: Host) -> None:
    started = host.live()
    assert started.alive()
    assert host.end() == 0
    assert not started.alive()
    assert not (host.runtime / "supervisor.sock").exists()
    assert not os.path.isdir(os.path.dirname(os.path.dirname(started.groups["unified"])))
    host.watch()
