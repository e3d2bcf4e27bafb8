"""The leash: a step, the end of a lease, and what happens outside a run."""

import json
import socket
import threading
import warnings

import pytest

import interlock
from interlock import leash, wire
from interlock.errors import Halted, Malformed, Stopped, TooMany, Unavailable
from interlock.order import Plan
from interlock.tier import Tier
from sandbox.profile import Host, for_plan


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(leash, "_state", {"n": -1, "warned": False})


@pytest.fixture
def broker(tmp_path_factory, monkeypatch):
    """A socket that gives the replies in `replies`, one a connection, and keeps the requests."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory(prefix="ilw", dir="/tmp") as folder:
        path = Path(folder) / "s"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen(4)
        found = Replies(listener)
        monkeypatch.setenv(wire.SOCKET_ENV, str(path))
        yield found
        found.end()


class Replies:
    def __init__(self, listener):
        self.listener, self.replies, self.asked = listener, [], []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            with peer:
                data = peer.recv(wire.LIMIT)
                if not data:
                    continue
                self.asked.append(json.loads(data))
                reply = self.replies.pop(0) if self.replies else b""
                if reply is not None:
                    peer.send(reply if isinstance(reply, bytes) else json.dumps(reply).encode())
                else:
                    peer.recv(1)  # says nothing until the other side gives up

    def end(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join(5)


def test_the_socket_is_where_the_sandbox_binds_it():
    host = Host((), "/usr", "/usr/bin/python3", "/init", "/guest")
    profile = for_plan(Plan(("true",), Tier.NONE, "lab", guest=True), 60_100, host, broker="/run/x/guest.sock")
    assert [s.target for s in profile.sockets] == [wire.socket_path()]


def test_a_step_counts_up_and_carries_integers(broker):
    broker.replies = [{"ok": True, "n": 0}, {"ok": True, "n": 1}, {"ok": True, "n": 40}]
    assert interlock.step() == 0
    assert interlock.step(loss_micro=12) == 1
    assert interlock.step(40) == 40
    assert broker.asked == [
        {"op": "step", "n": 0, "metrics": {}}, {"op": "step", "n": 1, "metrics": {"loss_micro": 12}},
        {"op": "step", "n": 40, "metrics": {}},
    ]


def test_stopped_is_not_swallowed_by_except_exception(broker):
    broker.replies = [{"ok": False, "error": Halted("gone", code="lease").as_json()}]
    def loop():
        try:
            interlock.step()
        except Exception:
            pytest.fail("a training loop would have gone on")

    with pytest.raises(Stopped) as ended:
        loop()
    assert not isinstance(ended.value, Exception)


def test_other_refusals_keep_their_type(broker):
    broker.replies = [{"ok": False, "error": TooMany("slower", code="steps").as_json()}]
    with pytest.raises(TooMany) as refusal:
        interlock.step()
    assert refusal.value.code == "too_many.steps"


def test_refuses_when_a_metric_is_a_float(broker):
    with pytest.raises(Malformed):
        interlock.step(loss=0.5)
    assert broker.asked == []


@pytest.mark.parametrize("reply", [b"", b"no json", b"[]", b'{"ok":1.5}', b"x" * 17_000])
def test_refuses_when_the_reply_is_off(broker, reply):
    broker.replies = [reply]
    with pytest.raises((Malformed, Unavailable)):
        interlock.step()


def test_refuses_when_the_broker_is_silent(broker):
    broker.replies = [None]
    with pytest.raises(Unavailable) as refusal:
        interlock.step(deadline_s=0.2)
    assert refusal.value.code == "unavailable.broker"


def test_outside_a_run_it_does_nothing_and_says_so_once(monkeypatch, tmp_path):
    monkeypatch.setenv(wire.SOCKET_ENV, str(tmp_path / "none"))
    monkeypatch.delenv(leash.RUN_ENV, raising=False)
    with pytest.warns(RuntimeWarning, match="holds no lease"):
        assert interlock.step() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert interlock.step() == 1
    assert interlock.run_id() == ""
    monkeypatch.setenv(leash.RUN_ENV, "run_1")
    assert interlock.run_id() == "run_1"


def test_refuses_when_a_socket_is_there_but_nobody_listens(monkeypatch):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory(prefix="ilw", dir="/tmp") as folder:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(Path(folder) / "s"))
        monkeypatch.setenv(wire.SOCKET_ENV, str(Path(folder) / "s"))
        with pytest.raises(Unavailable):
            interlock.step()
