"""Files that are proven before the commit: what is found early counts, what is not is found at the commit."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from interlock.errors import Conflict, Refusal, Unavailable, Untrusted
from runners import early_proof, saving, store
from runners.early_proof import Early
from runners.store import close_off
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


def test_a_finished_file_is_proven_while_the_guest_writes_another(door, proven):
    save = door.ready().begin(5)
    door.file(save, "a.sealed", 5, w=b"one")
    reply, fd = door.ask_file("save_file", save=save, name="b.sealed")
    until(lambda: ("a.sealed", False) in proven)
    seal(fd, reply, 5, v=b"two")
    os.close(fd)
    assert door.commit(save, items=2)["digest"]
    begun = door.ask("load_begin")
    assert [door.read(begun, name) for name in ("a.sealed", "b.sealed")] == [b"one", b"two"]
    assert proven.count(("a.sealed", True)) == 0  # the commit did not prove it again


def test_the_last_file_is_proven_before_the_commit_is_asked_for(door, proven):
    save = door.ready().begin(5)
    door.file(save, "a.sealed", 5, w=b"one")
    early = door.broker._desk._saving._open["run_1", 1].early
    until(lambda: "a.sealed" in early._proofs)
    assert door.commit(save, items=1)["digest"]
    assert ("a.sealed", True) not in proven


def test_a_file_that_had_a_writer_is_proven_once_it_has_none(door, proven):
    save = door.ready().begin(5)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    until(lambda: proven.count(("a.sealed", False)) > 1)
    early = door.broker._desk._saving._open["run_1", 1].early
    assert early._proofs == {}
    seal(fd, reply, 5, w=b"one")
    os.close(fd)
    until(lambda: "a.sealed" in early._proofs)
    assert door.commit(save, items=1)["digest"]


def test_refuses_when_a_file_that_was_tried_early_is_not_sealed(door, proven):
    save = door.ready().begin(5)
    _, fd = door.ask_file("save_file", save=save, name="a.sealed")
    os.write(fd, b"plain weights" * 100)
    os.close(fd)
    until(lambda: ("a.sealed", False) in proven)
    door.file(save, "b.sealed", 5, v=b"two")
    with pytest.raises(Refusal) as caught:
        door.commit(save, items=2)
    assert caught.value.code == "malformed.sealed"
    assert door.staged() == []


def test_refuses_when_a_writer_stayed_open_from_before(door, proven, monkeypatch):
    monkeypatch.setattr(saving, "close_off", lambda path, wait_ms=50: close_off(path, min(wait_ms, 50)))
    save = door.ready().begin(5)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    seal(fd, reply, 5, w=b"one")
    door.file(save, "b.sealed", 5, v=b"two")
    until(lambda: ("a.sealed", False) in proven)
    with pytest.raises(Conflict) as caught:
        door.commit(save, items=2)
    assert caught.value.code == "conflict.open_writer"
    os.close(fd)


def test_an_fsync_that_failed_early_fails_the_commit(door, monkeypatch):
    real, failing = os.fsync, True

    def fsync(fd):
        if failing and threading.current_thread().name.startswith("sync"):
            raise OSError(errno.EIO, "the disk is broken")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    save = door.ready().begin(5)
    door.file(save, "a.sealed", 5, w=b"one")
    with pytest.raises(Unavailable) as caught:
        door.commit(save, items=1)
    assert caught.value.code == "unavailable.disk"
    assert door.staged() == []
    failing = False
    assert door.save(6)  # control


def test_every_file_is_on_the_disk_before_the_manifest_is_written(door, monkeypatch):
    real, synced = os.fsync, []

    def fsync(fd):
        real(fd)
        if threading.current_thread() is not threading.main_thread():  # the guest's own do not count
            synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    monkeypatch.setattr(os, "fsync", fsync)
    save = door.ready().begin(5)
    for name in ("a.sealed", "b.sealed", "c.sealed"):
        door.file(save, name, 5, w=name.encode())
    assert door.commit(save, items=3)["digest"]
    assert sorted(synced[: synced.index("manifest.json")]) == ["a.sealed", "b.sealed", "c.sealed"]


def test_a_digest_found_at_the_commit_is_still_known_at_the_load(door, monkeypatch):
    door.ready().save(5, w=b"one")

    def never(_):
        raise AssertionError("read again")

    monkeypatch.setattr(store, "_hash", never)
    assert door.read(door.ask("load_begin")) == b"one"


def test_a_save_that_is_dropped_is_looked_into_no_more(door, proven):
    save = door.ready().begin(5)
    _, fd = door.ask_file("save_file", save=save, name="a.sealed")
    until(lambda: proven)
    door.ask("save_abort", save=save)
    time.sleep(0.1)  # longer than the longest pause
    assert not [t for t in threading.enumerate() if t.name == "early-proof"]
    os.close(fd)


def test_take_waits_for_a_proof_that_is_being_made_and_begins_none(monkeypatch):
    monkeypatch.setattr(early_proof, "THREADS", 1)
    early, going, started = Early(), threading.Event(), []

    def prove(name):
        started.append(name)
        assert going.wait(5)
        if name == "bad":
            raise Untrusted("no", code="sealed")
        return name, []

    early.add("a", lambda: prove("a"))
    until(lambda: started == ["a"])
    for name in ("bad", "b", "late"):
        early.add(name, lambda name=name: prove(name))
    assert early.take("late") is None
    assert started == ["a"]
    threading.Timer(0.05, going.set).start()
    assert early.take("a") == ("a", [])
    until(lambda: not early._waiting and not early._at_work)
    assert started == ["a", "bad", "b"]  # the commit has taken "late" upon itself
    assert early.take("bad") is None
    assert early.take("b") == ("b", [])
    assert early.take("b") is None
    early.end()
    early.add("c", lambda: prove("c"))
    time.sleep(0.02)
    assert "c" not in started


@pytest.mark.parametrize(("over", "count"), [(False, 2), (True, 1)])  # the first is the control
def test_what_is_stopped_is_not_read_on(door, proven, monkeypatch, over, count):
    read, real = [], saving.wrapped_of
    monkeypatch.setattr(early_proof, "THREADS", 1)
    save = door.ready().begin(5)
    held = [door.ask_file("save_file", save=save, name=name) for name in ("a.sealed", "b.sealed")]

    def ending(fd):
        read.append(fd)
        door.over = over
        return real(fd)

    monkeypatch.setattr(saving, "wrapped_of", ending)
    early = door.broker._desk._saving._open["run_1", 1].early
    for reply, fd in held:
        seal(fd, reply, 5, w=b"one")
        os.close(fd)
    until(lambda: not early._waiting and not early._at_work)
    assert len(read) == count
