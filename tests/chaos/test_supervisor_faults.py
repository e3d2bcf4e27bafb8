"""Rows of the fail-closed matrix at the supervisor: frozen from above, races, restarts, odd orders."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from interlock.errors import Halted, Refusal
from interlock.order import StopOrder
from interlock.signed import STOP, Signed, sign
from killswitch import offline
from tests.killswitch.host import HOSTILE, Host, wait_for

pytestmark = pytest.mark.root


def test_a_run_frozen_from_above_is_stopped(host: Host) -> None:
    started = host.live(code=HOSTILE)
    if "freezer" not in started.groups:
        pytest.skip("this host has no v1 freezer")
    above = Path(started.groups["freezer"]).parent / "freezer.state"
    above.write_text("FROZEN")
    try:
        assert len(started.alive()) >= 2
        status, found = host.stop("--run", "run_1")
        assert (status, found["result"]) == (0, "confirmed")
        assert found["latency_ms"] < 2_000
    finally:
        above.write_text("THAWED")


def test_a_run_frozen_from_above_is_stopped_while_the_supervisor_hangs(host: Host) -> None:
    started = host.live(code=HOSTILE)
    if "freezer" not in started.groups:
        pytest.skip("this host has no v1 freezer")
    above = Path(started.groups["freezer"]).parent / "freezer.state"
    above.write_text("FROZEN")
    host.signal(signal.SIGSTOP)
    try:
        assert len(started.alive()) >= 2
        status, found = host.stop("--all")
        assert (status, found["result"], found["by"]) == (0, "confirmed", "direct")
    finally:
        above.write_text("THAWED")


def test_a_disk_that_hangs_under_the_latch_holds_no_kill_back(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    started = host.live(code=HOSTILE)
    host.signal(signal.SIGSTOP)
    assert len(started.alive()) >= 2
    monkeypatch.setattr(offline, "drop", lambda folder, run: time.sleep(20))
    begin = time.monotonic()
    found = offline.stop(host.state, None)
    assert time.monotonic() - begin < 4
    assert (found["result"], found["why"]) == ("not_confirmed", "not latched")
    assert not started.alive()


def test_a_stop_at_any_moment_of_the_start_wins(host: Host) -> None:
    """Race: the stop comes 0 to 60 ms after the admission; whatever it meets, nothing lives on."""
    for turn in range(12):
        run = f"run_{turn}"
        host.beat()
        admitted = host.admit(run)
        told: list[str] = []

        def later(pause: float, run: str = run, told: list[str] = told) -> None:
            time.sleep(pause)
            told.append(host.ask("stop", scope=f"run:{run}", reason="race")["id"])

        racer = threading.Thread(target=later, args=(turn * 0.005,))
        racer.start()
        try:
            host.spawn(admitted, HOSTILE)
            host.beat()
        except (Refusal, ValueError, ProcessLookupError):
            pass  # the stop was first: the group is gone, or run init was turned away
        racer.join()
        wait_for(lambda told=told: host.ask("receipts", order=told[0])["result"] == "confirmed")
        assert not any(os.path.isdir(p) for p in admitted["groups"].values())
        assert host.row(run)["state"] == "gone"
        with pytest.raises(Halted):
            host.admit(run, 2)


def test_a_run_without_books_holds_back_every_receipt_after_a_restart(host: Host) -> None:
    """The supervisor restarts; the books of a living run cannot be read. No old stop is confirmed before it is dead."""
    order = host.ask("stop", scope="run:run_9", reason="")["id"]
    wait_for(lambda: host.ask("receipts", order=order)["result"] == "confirmed")
    started = host.live(code=HOSTILE)
    host.signal(signal.SIGSTOP)
    assert len(started.alive()) >= 2
    (host.state / "supervisor" / "runs" / "run_1.1.json").write_text("{")
    host.kill_supervisor()
    host.watch()
    found = host.ask("receipts", order=order)
    assert (found["result"], found["runs"]) == ("confirmed", [{"run": "run_1", "attempt": 1}])
    assert not started.alive()


def test_an_authentic_stop_of_an_unknown_mode_or_scope_is_never_lost(host: Host) -> None:
    started = host.live(code=HOSTILE)
    body = host.site.stop_order("run:run_1").body()
    assert started.alive()
    assert host.ask("order", order=sign(STOP, {**body, "mode": "nap"}, host.site.stop).as_json())["applied"]
    wait_for(lambda: host.ask("receipts", order=body["id"])["result"] == "confirmed")
    assert not started.alive()
    host.beat()
    assert host.admit("run_2")["run"] == "run_2"  # control: another run is not covered by it
    odd = sign(STOP, {**body, "id": "stop_odd", "scope": {"kind": "planet", "id": "x"}}, host.site.stop)
    assert host.ask("order", order=odd.as_json()) == {"applied": True, "id": "stop_odd"}
    with pytest.raises(Halted):
        host.admit("run_3")


def test_the_same_order_twice_gives_the_same_receipt_and_another_node_is_not_stopped(host: Host) -> None:
    started = host.live()
    other = host.site.stop_order("node:node-b")
    assert host.ask("order", order=other.as_json())["applied"]
    assert host.ask("receipts", order=other.body()["id"])["runs"] == []
    assert started.alive()
    order = host.site.stop_order("run:run_1").as_json()
    assert [host.ask("order", order=order)["applied"] for _ in range(2)] == [True, False]
    id_ = StopOrder.from_json(Signed.from_json(order).body()).id
    wait_for(lambda: host.ask("receipts", order=id_)["result"] == "confirmed")
    assert host.ask("receipts", order=id_) == host.ask("receipts", order=id_)


def test_two_starts_at_once_leave_exactly_one_that_answers(host: Host) -> None:
    host.kill_supervisor()  # its socket file stays behind
    for _ in range(4):
        argv = [sys.executable, "-I", "-m", "killswitch", "watch", "--state", str(host.state), "--runtime",
                str(host.runtime)]
        both = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/") for _ in range(2)]
        try:
            wait_for(lambda both=both: sum(p.poll() is not None for p in both) == 1, 10)
            lost = next(p for p in both if p.poll() is not None)
            kept = next(p for p in both if p is not lost)
            assert json.loads(lost.stderr.read())["error"]["code"] == "conflict.second_start"
            assert b"ready" in kept.stdout.readline()
            assert host.ask("status")["pid"] == kept.pid
        finally:
            for process in both:
                process.kill()
                process.wait()
                process.stdout.close()
                process.stderr.close()
    host.watch()


def test_a_log_that_nobody_reads_holds_up_no_stop(host: Host) -> None:
    """Standard error of the supervisor is a pipe that is full."""
    host.end()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    argv = [sys.executable, "-I", "-m", "killswitch", "watch", "--state", str(host.state), "--runtime",
            str(host.runtime)]
    host.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=writing, text=True, cwd="/")
    assert host.process.stdout is not None
    assert "ready" in host.process.stdout.readline()
    started = host.live(code=HOSTILE)
    assert started.alive()
    assert host.stop("--all")[0] == 0
    assert not started.alive()
    os.close(reading)
    os.close(writing)
