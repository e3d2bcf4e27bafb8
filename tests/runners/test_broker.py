"""The broker: who may speak, when, and what is on record before the answer."""

import array
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from interlock import wire
from interlock.call import Action, new_id
from interlock.errors import Malformed, NotFound, NotRecorded, TooMany
from interlock.event import Written
from interlock.order import Labels, Mode, Scope, ScopeKind, StopOrder
from interlock.permit import boottime_ms, issue
from interlock.tier import Tier
from runners.broker import Broker
from runners.broker_line import doorway
from runners.guest import STEPS_PER_S, Guest, answer
from tests.runners.conftest import needs_root

KEY = b"k" * 32
UID = 60_100
ALL = StopOrder("stop_1", Scope(ScopeKind.EVERYTHING), Mode.KILL, 1, "x", "")


class Door:
    """A broker in a thread, with the launcher's end in our hand."""

    def __init__(self, short: Path) -> None:
        self.folder, self.events = short, []
        self.stop, self.over, self.epoch, self.full = None, False, 0, False
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(5)
        self.broker = Broker(theirs, KEY, lambda _: self.stop, lambda: self.epoch, lambda *_: self.over, self._record)
        self._thread = threading.Thread(target=self.broker.serve, daemon=True)
        self._thread.start()

    def _record(self, event):
        if self.full:
            raise NotRecorded("the disk is full", code="full")
        self.events.append(event)
        return Written(event.id, "s", len(self.events))

    def say(self, request, *fds):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.ours.sendmsg([json.dumps(request).encode()], rights)
        return json.loads(self.ours.recv(65536))

    def open(self, *, key=KEY, run="run_1", epoch=0, life_ms=5000, action=Action.LAUNCH, uid=UID):
        permit = issue(call="c", action=action, resource="pool/default", run=run, epoch=epoch, record="r",
                       expires_ms=boottime_ms() + life_ms)
        labels = Labels("lab", "ada", "ada", "run_1", "node-1", Tier.HIGH)
        with doorway(self.folder, uid) as listener:
            return self.say({"op": "open", "run": "run_1", "attempt": 1, "uid": uid, "labels": labels.as_json(),
                             "resource": "pool/default", "permit": permit.seal(key)}, listener.fileno())

    def ask(self, uid, op="step", **fields):
        """Ask as `uid`, in a process of its own."""
        code = (
            "import os, sys, json, socket\n"
            "os.setgid(int(sys.argv[1])) if int(sys.argv[1]) else None\n"
            "os.setuid(int(sys.argv[1])) if int(sys.argv[1]) else None\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(5); s.connect(sys.argv[2])\n"
            "try: s.send(sys.argv[3].encode())\n"
            "except BrokenPipeError: pass\n"
            "print(s.recv(65536).decode())"
        )
        words = [sys.executable, "-I", "-S", "-c", code, str(uid), str(self.folder / "guest.sock"),
                 json.dumps({"op": op, **fields})]
        return json.loads(subprocess.run(words, capture_output=True, check=True, cwd="/").stdout)

    def close(self):
        self.ours.close()
        self._thread.join(5)
        self.broker.close()
        assert not self._thread.is_alive()


@pytest.fixture
def door(short):
    short.chmod(0o755)
    found = Door(short)
    yield found
    found.close()


pytestmark = [pytest.mark.root, needs_root]


def test_refuses_when_the_peer_uid_is_another(door):
    assert door.open()["ok"] is True
    refused = door.ask(0, n=1)  # root passes every file mode; the socket's owner is not the point
    assert refused["error"]["code"] == "untrusted.peer"
    assert door.ask(UID, n=1)["ok"] is True  # control
    kinds = [e.type.value for e in door.events]
    assert kinds == ["incident.raised", "run.step"]
    assert door.events[0].facts["peer_uid"] == 0


def test_refuses_when_a_stop_covers_the_run(door):
    door.open()
    assert door.ask(UID, n=1)["ok"] is True
    door.stop = ALL
    refused = door.ask(UID, n=2)
    assert refused["error"]["code"] == "stopped"
    assert door.ask(UID, op="status")["error"]["code"] == "stopped"
    door.stop = None
    assert door.ask(UID, op="status")["state"] == "live"


def test_refuses_when_the_lease_is_over(door):
    door.open()
    door.over = True
    assert door.ask(UID, n=1)["error"]["code"] == "stopped.lease"
    assert door.events == []


def test_a_step_is_on_record_before_its_answer(door):
    door.open()
    door.full = True
    assert door.ask(UID, n=1)["error"]["code"] == "not_recorded.full"
    door.full = False
    assert door.ask(UID, n=2, metrics={"loss_micro": -5}) == {"n": 2, "ok": True, "recorded": True}
    assert door.events[-1].facts["metrics"] == {"loss_micro": -5}


@pytest.mark.parametrize(("changed", "code"), [
    ({"key": b"x" * 32}, "untrusted.permit"), ({"run": "run_2"}, "untrusted.permit"),
    ({"epoch": 1}, "stopped.epoch"), ({"life_ms": -1}, "untrusted.permit"),
    ({"action": Action.READ_DATA}, "untrusted.permit"),
])
def test_refuses_when_the_permit_is_off(door, changed, code):
    assert door.open(**changed)["error"]["code"] == code
    assert door.open()["ok"] is True  # control
    assert door.open()["error"]["code"] == "conflict.guest"


def test_a_closed_run_cannot_ask(door):
    door.open()
    assert door.say({"op": "close", "run": "run_1", "attempt": 1}) == {"ok": True}
    with pytest.raises(subprocess.CalledProcessError):
        door.ask(UID, n=1)
    assert door.say({"op": "close", "run": "run_1", "attempt": 1}) == {"ok": True}


@pytest.mark.parametrize("data", [b"no json", b"[]", b'{"op":"step","n":1.5}', b'{"op":"step"}', b"x" * 16_384])
def test_refuses_when_a_request_is_malformed(door, data):
    door.open(uid=os.geteuid() or UID)
    code = (
        "import os, sys, socket\nos.setgid(60100); os.setuid(60100)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(5); s.connect(sys.argv[1])\n"
        "s.send(sys.stdin.buffer.read()); print(s.recv(65536).decode())"
    )
    words = [sys.executable, "-I", "-S", "-c", code, str(door.folder / "guest.sock")]
    said = subprocess.run(words, input=data, capture_output=True, check=True, cwd="/").stdout
    assert json.loads(said)["error"]["code"].startswith("malformed")
    assert door.ask(UID, n=1)["ok"] is True


def test_a_silent_connection_is_hung_up(door):
    door.open(uid=UID)
    hold = (
        "import os, sys, socket, time\nos.setgid(60100); os.setuid(60100)\n"
        "c = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(40)]\n"
        "[s.connect(sys.argv[1]) for s in c]\nprint('held', flush=True); time.sleep(30)"
    )
    holder = subprocess.Popen([sys.executable, "-I", "-S", "-c", hold, str(door.folder / "guest.sock")],
                              stdout=subprocess.PIPE, cwd="/")
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        until = time.monotonic() + 6
        while door.ask(UID, n=1).get("ok") is not True:
            assert time.monotonic() < until
            time.sleep(0.2)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def _guest(tier: Tier) -> Guest:
    return Guest("run_1", 1, UID, Labels("lab", "ada", "ada", "run_1", "n", tier))


def test_steps_of_tier_none_are_summed_up_and_others_kept():
    none, high = _guest(Tier.NONE), _guest(Tier.HIGH)
    kept = [answer(none, {"op": "step", "n": n}, 10_000 + n * 100)[1] for n in range(25)]
    assert [k["steps"] for k in kept if k] == [1, 10, 10]
    assert all(answer(high, {"op": "step", "n": n}, 10_000 + n * 100)[1] for n in range(25))


def test_refuses_when_steps_come_too_fast_for_a_full_record():
    high = _guest(Tier.HIGH)
    for n in range(STEPS_PER_S):
        answer(high, {"op": "step", "n": n}, 10_000)
    with pytest.raises(TooMany):
        answer(high, {"op": "step", "n": 99}, 10_000)
    answer(high, {"op": "step", "n": 100}, 11_000)


@pytest.mark.parametrize("request_", [
    {"op": "step", "n": -1}, {"op": "step", "n": 1, "metrics": {"Loss": 1}},
    {"op": "step", "n": 1, "metrics": {"loss": True}},
    {"op": "step", "n": 1, "metrics": {f"m{i}": 1 for i in range(17)}},
])
def test_refuses_when_a_step_is_malformed(request_):
    with pytest.raises(Malformed):
        answer(_guest(Tier.HIGH), request_, 1)


def test_refuses_when_the_operation_is_unknown():
    with pytest.raises(NotFound):
        answer(_guest(Tier.HIGH), {"op": new_id("x")}, 1)


def test_the_wire_has_one_limit():
    assert wire.encode({"a": "x" * 16_000})
    with pytest.raises(Malformed):
        wire.encode({"a": "x" * 17_000})
    with pytest.raises(Malformed):
        wire.encode({"a": float("nan")})
