"""Keys on their way: asked for until they come, handed on once, and kept nowhere."""

import base64
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from interlock.errors import Denied, Halted, Malformed, NotFound, Unavailable
from runners import key_delivery
from runners.key_delivery import deliver

KEY = base64.b64encode(b"k" * 32).decode()


@dataclass
class Fake:
    """Station, control plane and broker at once. `answers` are taken one by one; an exception is raised."""

    answers: list
    broker_answers: list = field(default_factory=list)
    handed: list = field(default_factory=list)
    events: list = field(default_factory=list)
    newest: object = None

    @property
    def upstream(self):
        return SimpleNamespace(keys=lambda *_: self._next(self.answers))

    def broker(self):
        return SimpleNamespace(keys=self._hand)

    def _hand(self, *what, newest):
        self.newest = newest
        if self.broker_answers:
            self._next(self.broker_answers)
        self.handed.append(what)

    def record(self, kind, order, facts):
        self.events.append((kind.value, order.run, facts))

    @staticmethod
    def _next(rows):
        found = rows.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(key_delivery, "PAUSE_S", 0.01)


ORDER = SimpleNamespace(run="run_1", attempt=2)
GIVEN = {"run_key": KEY, "files": {"sha256:v": {"a.sealed": KEY}}, "newest": [7, 1]}


def test_keys_are_asked_for_until_they_come(monkeypatch):
    station = Fake([Unavailable("away"), Denied("not yet", code="lease"), GIVEN, GIVEN], [Unavailable("broker"), None])
    deliver(station, ORDER, threading.Event())
    assert station.handed == [("run_1", 2, b"k" * 32, {"sha256:v": {"a.sealed": b"k" * 32}})]
    assert station.newest == (7, 1)
    assert station.events == []


@pytest.mark.parametrize("refusal", [Denied("no", code="owner"), Halted("stopped"), NotFound("no", code="attempt")])
def test_a_refusal_is_recorded_and_ends_it(refusal):
    station = Fake([refusal])
    deliver(station, ORDER, threading.Event())
    assert station.handed == []
    assert station.events == [("key.refused", "run_1", {"code": refusal.code})]


def test_it_ends_with_the_attempt():
    over = threading.Event()
    station = Fake([Unavailable("away")] * 100_000)
    thread = threading.Thread(target=deliver, args=(station, ORDER, over))
    thread.start()
    over.set()
    thread.join(5)
    assert not thread.is_alive()
    assert station.events == []


@pytest.mark.parametrize("answer", [
    {**GIVEN, "newest": "7"}, {**GIVEN, "newest": [7]}, {**GIVEN, "newest": [7, True]},
    {}, {"run_key": KEY}, {"run_key": "c2hvcnQ=", "files": {}}, {"run_key": KEY + "!", "files": {}},
    {"run_key": None, "files": {"v": [KEY]}}, {"run_key": None, "files": {"v": {"a": None}}},
])
def test_refuses_when_an_answer_holds_no_keys(answer):
    station = Fake([answer])
    deliver(station, ORDER, threading.Event())
    assert station.handed == []
    assert station.events[0][2] == {"code": "malformed.keys"}
    with pytest.raises(Malformed) as refused:
        (key_delivery.read_keys(answer), key_delivery.newest_of(answer))
    assert KEY not in str(refused.value)
