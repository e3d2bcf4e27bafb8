"""Story: a hostile command on a host whose control plane is gone, stopped by one command, kept stopped.

Real supervisor, real control groups, real processes. There is no control plane at all: no server, no
database, no network; what it signed before it went away is played by the test's keys.
"""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from interlock.errors import Halted, LayerMissing
from interlock.order import Plan
from interlock.tier import Tier
from killswitch.verify import uid_of, with_uid
from sandbox import layers, start, uids, work
from sandbox.cgroup import Group
from sandbox.profile import for_plan
from tests.killswitch.conftest import need_root
from tests.killswitch.host import HOSTILE, Host, wait_for
from tests.killswitch.site import save

pytestmark = pytest.mark.root


def _page(admitted: dict[str, Any]) -> Path:
    return Path(admitted["deadline_page"])


@pytest.fixture
def host() -> Iterator[Host]:
    need_root()
    found = Host()
    found.watch()
    try:
        yield found
    finally:
        found.clean()


def test_stop_without_a_control_plane_is_proven_and_sticks(host: Host) -> None:
    started = host.live("run_1", HOSTILE, uid=60_970)
    bystander = host.live("run_2")
    wait_for(lambda: len(started.alive()) > 30)  # the bomb is at its cap, every signal but SIGKILL ignored

    begin = time.monotonic()
    status, found = host.stop("--run", "run_1", "--reason", "it forks without end")
    seconds = time.monotonic() - begin
    assert (status, found["result"]) == (0, "confirmed")
    assert found["runs"] == [{"run": "run_1", "attempt": 1}]
    assert seconds <= 5
    assert not started.alive()
    assert bystander.alive(), "a stop of one run leaves the others alone"

    with pytest.raises(Halted) as caught:
        host.admit("run_1", 2)
    assert caught.value.details["order"] == found["order"]
    host.kill_supervisor()
    host.watch()
    host.beat()
    with pytest.raises(Halted):
        host.admit("run_1", 3)

    other = host.ask("stop", scope="run:run_9", reason="stays")["id"]
    for people in (("ada",), ("ada", "ada")):
        alone = save(host.folder / "alone", host.site.resume([found["order"]], people))
        done = host.command("resume", str(alone))
        assert done.returncode == 1
        assert json.loads(done.stderr)["error"]["code"] == "untrusted.threshold"
    two = save(host.folder / "two", host.site.resume([found["order"]], ("ada", "bela")))
    assert host.command("resume", str(two)).returncode == 0
    status_now = host.ask("status")
    assert [s["id"] for s in status_now["stops"]] == [other]
    assert status_now["cleared"] == [found["order"]]
    host.beat()
    assert host.admit("run_1", 4)["attempt"] == 4


def test_a_run_in_the_real_sandbox_is_stopped_with_proof(host: Host) -> None:
    """The same with bubblewrap, seccomp and the real run init: hostile, own uid, own namespaces."""
    try:
        layers.find_bwrap()
    except LayerMissing as error:
        pytest.skip(f"this host lacks a layer: {error.message}")
    pool = uids.Pool(60_900, 60_960)
    uid = pool.take()
    plan = Plan(("x",), Tier.CRITICAL, "acme", pids=64, memory_mb=256, work_mb=8, cpu_seconds=60)
    profile = for_plan(plan, uid, layers.this_host())
    host.beat()
    admitted = host.admit()
    group = Group("run_1.1", admitted["groups"])
    disk = work.mount(host.runtime, "run_1.1", profile)
    try:
        argv = ("python3", "-c", HOSTILE)
        with closing(start.start(start.StartSpec(profile, argv, group, _page(admitted), disk))) as started:
            fds = [started.init_pidfd, started.pipe_write_fd]
            assert host.ask("spawned", run="run_1", attempt=1, fds=fds) == {"state": "blocked"}
            started.release_pipe()
            before = len(group.pids())
            host.beat()
            assert host.row()["state"] == "live"
            wait_for(lambda: len(group.pids()) > before + 20)
            assert uid_of(started.pid) == uid

            status, found = host.stop("--run", "run_1")
            assert (status, found["result"]) == (0, "confirmed")
            assert found["latency_ms"] <= 5_000
            assert with_uid(uid) == []
            assert not group.exists()
            started.process.wait(10)
    finally:
        disk.remove()
    with pytest.raises(Halted):
        host.admit("run_1", 2)


def test_the_real_run_init_counts_down_while_the_supervisor_hangs(host: Host) -> None:
    """G18: run init is a watcher of its own; the supervisor is stopped and holds the pipe open."""
    try:
        layers.find_bwrap()
    except LayerMissing as error:
        pytest.skip(f"this host lacks a layer: {error.message}")
    uid = uids.Pool(60_900, 60_960).take()
    plan = Plan(("x",), Tier.CRITICAL, "acme", pids=64, memory_mb=256, work_mb=8, cpu_seconds=60)
    profile = for_plan(plan, uid, layers.this_host())
    host.beat()
    admitted = host.admit()
    group = Group("run_1.1", admitted["groups"])
    disk = work.mount(host.runtime, "run_1.1", profile)
    try:
        spec = start.StartSpec(profile, ("sleep", "60"), group, _page(admitted), disk)
        with closing(start.start(spec)) as started:
            host.ask("spawned", run="run_1", attempt=1, fds=[started.init_pidfd, started.pipe_write_fd])
            started.release_pipe()
            asked = host.ask("beats")
            lease = host.site.lease(asked["beats"][0], duration_ms=1_500)
            host.ask("answer", answer=host.site.answer(asked, leases=[lease]))
            assert host.row()["state"] == "live"
            host.signal(signal.SIGSTOP)
            # The supervisor may have bridged to its absence limit before it was stopped: the page says what holds now.
            deadline = int.from_bytes(_page(admitted).read_bytes()[8:16], sys.byteorder) / 1e9
            left = deadline - time.clock_gettime(time.CLOCK_BOOTTIME)
            assert left <= 10.0
            wait_for(lambda: with_uid(uid) != [])
            wait_for(lambda: with_uid(uid) == [], left + 2.0)
            started.process.wait(10)
    finally:
        disk.remove()
