"""The broker as it runs: its own process, uid and memory, with a run of another uid before it."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from interlock.call import Action
from interlock.errors import NotFound
from interlock.permit import boottime_ms, issue
from killswitch.page import DeadlineWriter, StopPage, StopPageWriter
from killswitch.state import StopState
from runners.broker_line import BrokerLine, doorway
from runners.entitlements import Entitlements
from runners.join import join
from runners.pinned import Pinned
from runners.upstream import Upstream
from tests.runners.conftest import needs_root
from tests.runners.door import RUN_KEY
from tests.runners.programs import BROKER_UID, give_bundle, order

pytestmark = [pytest.mark.root, needs_root]
UID = 60_100
GUEST = """
import json, os, sys
uid = int(sys.argv[1])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
os.environ["INTERLOCK_SOCKET"] = sys.argv[2]
from interlock import wire, sealed
import base64
begun = wire.ask("save_begin", step=3, kind="state")
reply, fd = wire.ask_with_file("save_file", save=begun["save"], name="a.sealed")
writer = sealed.Writer(fd, base64.b64decode(reply["key"]), base64.b64decode(reply["wrapped"]), sys.argv[3], 3)
writer.add("w", (), b"weights")
writer.finish()
os.close(fd)
done = wire.ask("save_commit", save=begun["save"], items=1, deadline_s=20)
load = wire.ask("load_begin")
reply, fd = wire.ask_with_file("load_file", load=load["load"], name="a.sealed", deadline_s=20)
data = bytes(sealed.Reader(fd, base64.b64decode(reply["key"]), sys.argv[3], 3).read(0)).decode()
try:
    os.listdir(sys.argv[4])
    seen = True
except PermissionError:
    seen = False
print(json.dumps({"digest": done["digest"], "same": load["digest"] == done["digest"], "data": data, "seen": seen}))
"""


class Pages:
    """A supervisor's pages, kept fresh by a thread."""

    def __init__(self, host):
        self._writer, self._state = StopPageWriter(host.page, host.stop_state), StopState()
        self._end = threading.Event()
        self._writer.write(self._state)
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _keep(self):
        while not self._end.wait(0.2):
            self._writer.write(self._state)

    def end(self):
        self._end.set()
        self._thread.join(5)


@pytest.fixture
def line(site, simulator, host, short):
    give_bundle(site)
    join(simulator.join_file(short / "j"), host)
    pages = Pages(host)
    with Upstream(host) as upstream:
        pins = Pinned(host)
        entitled = Entitlements(host, upstream, pins.grant_keys, pins.signers)
        entitled.refresh()
        made = BrokerLine(host, site.node, BROKER_UID)
        made.entitled = entitled
        try:
            yield made
        finally:
            made.end()
            pages.end()


def _guest(host, run, uid=UID):
    words = [sys.executable, "-c", GUEST, str(uid), str(host.run(run, 1) / "guest.sock"), run,
             str(host.store / run)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


LOOK_IN = """
import os, sys
uid = int(sys.argv[1])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
for name in ("mem", "environ", "maps"):
    try:
        open(f"/proc/{sys.argv[2]}/{name}", "rb").read(1)
        print(name)
    except OSError:
        pass
"""


def _look_in(pid):
    words = [sys.executable, "-I", "-S", "-c", LOOK_IN, BROKER_UID, str(pid)]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.split()


def test_a_run_saves_through_the_real_broker_and_sees_no_store(line, host, site):
    wanted = order(site, "true", guest=True, checkpoints=True)
    folder = host.run(wanted.run, 1)
    folder.mkdir(parents=True)
    epoch = StopPage(host.page, host.stop_state).epoch()
    permit = issue(call="c", action=Action.LAUNCH, resource="pool/default", run=wanted.run, epoch=epoch, record="r",
                   expires_ms=boottime_ms() + 5000)
    page = DeadlineWriter(host.deadline(wanted.run, 1), boottime_ms() + 60_000)
    try:
        with doorway(folder, UID) as listener:
            line.open(wanted, permit, UID, listener)
        assert "unavailable.keys" in _guest(host, wanted.run).stderr
        line.keys(wanted.run, 1, RUN_KEY, {})
        with pytest.raises(NotFound, match=r"not_found\.guest"):
            line.keys("run_other", 1, RUN_KEY, {})
        done = _guest(host, wanted.run)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said == {"digest": said["digest"], "same": True, "data": "weights", "seen": False}
        page.set(0)
        assert "stopped.lease" in _guest(host, wanted.run).stderr
        time.sleep(1.1)
        page.set(boottime_ms() + 60_000)  # a lease that came back brings no keys back
        assert "unavailable.keys" in _guest(host, wanted.run).stderr
    finally:
        line.close(wanted.run, 1)
        page.remove()


def test_the_process_has_its_own_uid_and_a_closed_memory(line):
    status = Path(f"/proc/{line.pid}/status").read_text()
    assert f"Uid:\t{BROKER_UID}\t{BROKER_UID}\t{BROKER_UID}\t{BROKER_UID}" in status
    limits = Path(f"/proc/{line.pid}/limits").read_text()
    assert next(r.split()[4:6] for r in limits.splitlines() if r.startswith("Max core file")) == ["0", "0"]
    assert _look_in(line.pid) == []
    other = subprocess.Popen(["/usr/bin/sleep", "20"], user=int(BROKER_UID), group=int(BROKER_UID))
    try:
        time.sleep(0.2)
        assert "environ" in _look_in(other.pid)  # control: of an open process of that uid it reads
    finally:
        other.kill()
        other.wait()
