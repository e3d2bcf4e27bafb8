"""Files that are proven before the commit: what is found early counts, what is not is found at the commit."""

import os
import threading
import time

import pytest

from interlock.errors import Conflict, Refusal, Untrusted
from runners import saving, store
from runners.early_proof import Early
from tests.runners.door import Door, seal


@pytest.fixture
def door(short):
    found = Door(short)
    yield found
    found.close()


@pytest.fixture
def proven(monkeypatch):
    """The names in the order in which a proof of them was begun, each with whether it waited for a writer."""
    seen = []
    real = saving.Saving._prove

    def spy(self, guest, save, name, run_key, wait_ms=None):
        seen.append((name, wait_ms != 0))
        return real(self, guest, save, name, run_key, wait_ms)

    monkeypatch.setattr(saving.Saving, "_prove", spy)
    return seen


def until(check):
    end = time.monotonic() + 5
    while not check():
        assert time.monotonic() < end
        time.sleep(0.005)


def idle():
    return not any(t.name == "early-proof" for t in threading.enumerate())


def test_a_finished_file_is_proven_while_the_next_one_is_written(door, proven):
    save = door.ready().begin(5)
    door.file(save, "a.sealed", 5, w=b"one")
    door.file(save, "b.sealed", 5, v=b"two")
    until(lambda: ("a.sealed", False) in proven)
    assert door.commit(save, items=2)["digest"]
    assert proven == [("a.sealed", False), ("b.sealed", True)]  # the last one has nobody after it
    begun = door.ask("load_begin")
    assert [door.read(begun, name) for name in ("a.sealed", "b.sealed")] == [b"one", b"two"]


def test_a_file_that_still_has_a_writer_is_proven_at_the_commit(door, proven):
    save = door.ready().begin(5)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    door.file(save, "b.sealed", 5, v=b"two")
    until(lambda: ("a.sealed", False) in proven)
    seal(fd, reply, 5, w=b"one")
    os.close(fd)
    assert door.commit(save, items=2)["digest"]
    assert proven.count(("a.sealed", True)) == 1


def test_a_file_that_had_a_writer_is_tried_again_with_the_next_one(door, proven):
    save = door.ready().begin(5)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    door.file(save, "b.sealed", 5, v=b"two")
    until(lambda: ("a.sealed", False) in proven)
    seal(fd, reply, 5, w=b"one")
    os.close(fd)
    time.sleep(0.05)
    door.file(save, "c.sealed", 5, u=b"three")
    until(lambda: ("b.sealed", False) in proven)
    assert door.commit(save, items=3)["digest"]
    assert sorted(proven) == [("a.sealed", False), ("a.sealed", False), ("b.sealed", False), ("c.sealed", True)]


def test_refuses_when_a_file_that_was_tried_early_is_not_sealed(door, proven):
    save = door.ready().begin(5)
    _, fd = door.ask_file("save_file", save=save, name="a.sealed")
    os.write(fd, b"plain weights" * 100)
    os.close(fd)
    door.file(save, "b.sealed", 5, v=b"two")
    until(lambda: ("a.sealed", False) in proven)
    with pytest.raises(Refusal) as caught:
        door.commit(save, items=2)
    assert caught.value.code == "malformed.sealed"
    assert door.staged() == []


def test_refuses_when_a_writer_stayed_open_from_before(door, proven, monkeypatch):
    monkeypatch.setattr(store, "WRITER_MS", 50)
    save = door.ready().begin(5)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    seal(fd, reply, 5, w=b"one")
    door.file(save, "b.sealed", 5, v=b"two")
    until(lambda: ("a.sealed", False) in proven)
    with pytest.raises(Conflict) as caught:
        door.commit(save, items=2)
    assert caught.value.code == "conflict.open_writer"
    os.close(fd)


def test_only_one_proof_is_made_at_a_time():
    early, going, started = Early(), False, []

    def prove(name):
        started.append(name)
        while not going:
            time.sleep(0.002)
        if name == "bad":
            raise Untrusted("no", code="sealed")
        return name, []

    early.begin(["a", "bad"], prove)
    until(lambda: started == ["a"])
    early.begin(["a", "bad", "c"], prove)
    assert started == ["a"]
    going = True
    assert early.take("c") is None
    assert early.take("a") == ("a", [])
    assert early.take("bad") is None
    early.begin(["a", "bad", "c"], prove)
    assert early.take("c") == ("c", [])
    assert started == ["a", "bad", "c"]


@pytest.mark.parametrize(("over", "count"), [(False, 2), (True, 1)])  # the first is the control
def test_what_is_stopped_is_not_read_on(door, monkeypatch, over, count):
    read, real = [], saving.wrapped_of
    save = door.ready().begin(5)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    door.file(save, "b.sealed", 5, v=b"two")
    until(idle)
    seal(fd, reply, 5, w=b"one")
    os.close(fd)

    def ending(fd):
        read.append(fd)
        door.over = over
        return real(fd)

    monkeypatch.setattr(saving, "wrapped_of", ending)
    _, fd = door.ask_file("save_file", save=save, name="c.sealed")
    os.close(fd)
    until(lambda: read)
    until(idle)
    assert len(read) == count  # of a and b, both tried now
