"""Saves: what gets into the store, and what does not."""

import base64
import mmap
import os
import threading
import time

import pytest

from interlock import wire
from interlock.call import Action
from interlock.errors import (
    Conflict,
    Denied,
    Halted,
    Malformed,
    NotFound,
    NotRecorded,
    Refusal,
    TooMany,
    Unavailable,
    Untrusted,
)
from interlock.manifest import FileRow, Manifest
from interlock.order import Mode, Scope, ScopeKind, StopOrder
from runners import checkpoints, saving, store
from tests.runners.door import RUN_KEY, UID, Door, as_uid, seal

ALL = StopOrder("stop_1", Scope(ScopeKind.EVERYTHING), Mode.KILL, 1, "x", "")


@pytest.fixture
def door(short):
    found = Door(short)
    yield found
    found.close()


def test_what_was_saved_loads_and_both_are_on_record(door):
    door.ready()
    time.sleep(0.02)
    first = door.save(5, w=b"five")
    begun = door.ask("load_begin")
    assert (begun["step"], begun["kind"], begun["digest"], begun["run"]) == (5, "state", first, "run_1")
    assert door.read(begun) == b"five"
    assert door.kinds() == ["checkpoint.begun", "checkpoint.committed", "checkpoint.loaded"]
    committed = next(e.facts for e in door.events if e.type.value == "checkpoint.committed")
    assert (committed["digest"], committed["items"], committed["step"], committed["parent"]) == (first, 1, 5, None)
    kept = door.root / "store" / "run_1" / "5-1"
    assert {p.name: p.stat().st_mode & 0o777 for p in kept.iterdir()} == {"a.sealed": 0o400, "manifest.json": 0o400}
    assert kept.parent.stat().st_mode & 0o077 == 0
    assert door.staged() == []
    calls = [(c.action, c.resource.path, c.run, c.bound) for c, _ in door.view.calls]
    assert calls == [(Action.SAVE, "run/run_1", "run_1", "sha256:p"), (Action.LOAD, "run/run_1", "run_1", "sha256:p")]
    facts = door.view.calls[0][1]
    assert facts.own
    assert facts.mfa_age_ms > 1000  # it grows from what was told at the start


def test_a_save_goes_on_from_what_was_saved_or_loaded_before(door):
    door.ready()
    first = door.save(1)
    assert door.ask("save_begin", step=2, kind="state")["parent"] == first
    door.close_run()
    door.ready(attempt=2)
    assert door.ask("save_begin", step=2, kind="state")["parent"] == first  # the newest, in a new attempt


def test_no_key_is_in_any_record(door):
    door.ready()
    door.save(1)
    text = "".join(str(e.as_json()) for e in door.events)
    assert base64.b64encode(RUN_KEY).decode() not in text
    assert RUN_KEY.hex() not in text


# --- who may begin ------------------------------------------------------------------------------------

def test_refuses_when_the_plan_keeps_no_checkpoints(door):
    door.ready(checkpoints=False)
    with pytest.raises(Denied, match=r"denied\.plan"):
        door.begin(1)
    door.close_run()
    door.ready(attempt=2)
    door.begin(1)  # control


def test_refuses_when_the_keys_have_not_come(door):
    door.open()
    for op, fields in (("save_begin", {"step": 1, "kind": "state"}), ("load_begin", {})):
        with pytest.raises(Unavailable, match=r"unavailable\.keys"):
            door.ask(op, **fields)
    assert door.kinds() == []  # the guest asks again and again: that fills no disk
    door.keys()
    door.begin(1)  # control


def test_refuses_when_the_gate_says_no(door):
    door.ready()
    door.view.denied = {Action.SAVE}
    with pytest.raises(Denied, match=r"denied\.no_match"):
        door.begin(1)
    assert door.staged() == []
    assert door.kinds() == ["checkpoint.refused"]
    assert door.events[-1].facts == {"attempt": 1, "op": "save_begin", "code": "denied.no_match", "count": 1}
    door.view.denied, door.view.age_ms = set(), 10**9
    with pytest.raises(Refusal, match="stale"):
        door.begin(1)
    door.view.age_ms = 0
    door.begin(1)  # control


def test_refuses_when_the_begin_is_not_on_record(door):
    door.ready()
    door.full = {"checkpoint.begun"}
    with pytest.raises(NotRecorded):
        door.begin(1)
    assert door.staged() == []
    door.full = set()
    door.begin(1)  # control


def test_refuses_when_a_stop_comes_between_gate_and_begin(door):
    door.ready()
    honest = door.record

    def slow(event):
        door.epoch += event.type.value == "checkpoint.begun"
        return honest(event)

    door.rewire(slow)
    with pytest.raises(Halted, match=r"stopped\.epoch"):
        door.begin(1)
    assert door.staged() == []
    door.rewire(honest)
    door.begin(1)  # control


def test_refuses_when_the_disk_is_nearly_full(door, monkeypatch):
    door.ready()
    disk = os.statvfs(door.root)
    for free in (store.ROOM_BYTES // disk.f_frsize - 1, disk.f_blocks // store.ROOM_SHARE - 1):
        fields = list(disk)
        fields[4] = max(0, free)
        with monkeypatch.context() as patch:
            patch.setattr(store.os, "statvfs", lambda _, rows=tuple(fields): os.statvfs_result(rows))
            with pytest.raises(Unavailable, match=r"unavailable\.disk"):
                door.begin(1)
    door.begin(1)  # control


def test_refuses_when_saves_are_begun_too_fast(door, monkeypatch):
    monkeypatch.setattr(checkpoints, "BEGINS", 3)
    door.ready()
    for step in range(3):
        door.begin(step)
    with pytest.raises(TooMany):
        door.begin(4)


def test_a_begin_drops_the_older_one(door):
    door.ready()
    old = door.begin(1)
    fresh = door.begin(2)
    assert len(door.staged()) == 1
    with pytest.raises(NotFound, match=r"not_found\.save"):
        door.ask_file("save_file", save=old, name="a.sealed")
    door.file(fresh, "a.sealed", 2, w=b"x")
    assert door.commit(fresh)["digest"]


def test_refuses_when_the_save_is_another_runs(door):
    door.ready()
    door.ready("run_2")
    save, _ = door.begin(1), door.begin(1, "run_2")
    door.file(save, "a.sealed", 1, w=b"x")
    for op, fields in (("save_file", {"name": "b.sealed"}), ("save_commit", {"items": 1})):
        with pytest.raises(NotFound, match=r"not_found\.save"):
            door.ask(op, "run_2", save=save, **fields)
    assert door.ask("save_abort", "run_2", save=save) == {}
    assert door.commit(save)["digest"]  # control: it is still there for its own run


def test_an_abort_leaves_nothing_and_may_come_twice(door):
    door.ready()
    save = door.begin(1)
    assert door.ask("save_abort", save=save) == {}
    assert door.staged() == []
    assert door.ask("save_abort", save=save) == {}
    with pytest.raises(NotFound):
        door.commit(save)


def test_the_end_of_an_attempt_takes_its_open_save_along(door):
    door.ready()
    door.begin(1)
    door.close_run()
    assert door.staged() == []


# --- files --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["../x.sealed", "/x.sealed", "X.sealed", "manifest.json", "a/b.sealed", "", None])
def test_refuses_when_a_file_has_an_odd_name(door, name):
    door.ready()
    save = door.begin(1)
    with pytest.raises(Malformed):
        door.ask_file("save_file", save=save, name=name)
    door.file(save, "x.sealed", 1, w=b"x")  # control


def test_refuses_when_a_file_is_made_twice_or_there_are_too_many(door, monkeypatch):
    monkeypatch.setattr(saving, "MAX_FILES", 2)
    door.ready()
    save = door.begin(1)
    door.file(save, "a.sealed", 1, w=b"x")
    with pytest.raises(Conflict, match=r"conflict\.file"):
        door.ask_file("save_file", save=save, name="a.sealed")
    door.file(save, "b.sealed", 1, w=b"x")
    with pytest.raises(Malformed, match=r"malformed\.files"):
        door.ask_file("save_file", save=save, name="c.sealed")
    assert door.commit(save, items=2)["digest"]  # control


def _bytes_of(door, name="a.sealed"):
    (folder,) = (door.root / "staging").iterdir()
    return folder / name


def _change(door, how):
    path = _bytes_of(door)
    path.write_bytes(how(path.read_bytes()))


FLAWS = {
    "flipped": lambda d: d[:-200] + bytes([d[-200] ^ 1]) + d[-199:],
    "longer": lambda d: d + b"x",
    "shorter": lambda d: d[:-1],
    "empty": lambda _: b"",
    "plain": lambda _: b"plain weights, in the clear" * 50,
    "pickled": lambda _: b"\x80\x04\x95" + b"x" * 500,
    "another header": lambda d: d[:60] + bytes([d[60] ^ 1]) + d[61:],
}


@pytest.mark.parametrize("flaw", sorted(FLAWS))
def test_refuses_when_a_file_is_not_sealed_as_it_was_made(door, flaw):
    door.ready()
    old = door.save(1, w=b"old")
    save = door.begin(2)
    door.file(save, "a.sealed", 2, w=bytes(400))
    _change(door, FLAWS[flaw])
    with pytest.raises(Refusal) as refused:
        door.commit(save)
    assert refused.value.code in ("untrusted.sealed", "malformed.sealed")
    assert door.staged() == []
    assert door.ask("load_begin")["digest"] == old
    assert door.kinds()[-2:] == ["checkpoint.refused", "checkpoint.loaded"]
    door.save(2)  # control


def test_refuses_when_a_file_carries_the_key_of_another(door):
    door.ready()
    save = door.begin(1)
    first, one = door.ask_file("save_file", save=save, name="a.sealed")
    _, two = door.ask_file("save_file", save=save, name="b.sealed")
    for fd in (one, two):  # the second is sealed well, with the first one's key
        seal(fd, first, 1, w=b"x")
        os.close(fd)
    with pytest.raises(Untrusted, match=r"untrusted\.sealed"):
        door.commit(save, items=2)


def test_refuses_when_a_header_carries_another_key_than_was_given(door):
    door.ready()
    save = door.begin(1)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    other = base64.b64encode(os.urandom(60)).decode()
    seal(fd, {**reply, "wrapped": other}, 1, w=b"x")  # sealed well, by the key that was given
    os.close(fd)
    with pytest.raises(Untrusted, match=r"untrusted\.sealed"):
        door.commit(save)
    door.save(1)  # control


def test_refuses_when_a_file_was_sealed_for_another_step(door):
    door.ready()
    save = door.begin(2)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    seal(fd, reply, 1, w=b"x")
    os.close(fd)
    with pytest.raises(Untrusted, match=r"untrusted\.sealed"):
        door.commit(save)


def test_refuses_when_a_file_is_still_open_for_writing(door, monkeypatch):
    monkeypatch.setattr(store, "WRITER_MS", 150)
    door.ready()
    save = door.begin(1)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    seal(fd, reply, 1, w=b"x")
    with pytest.raises(Conflict, match=r"conflict\.open_writer"):
        door.commit(save)
    os.close(fd)
    assert door.root.joinpath("store").is_dir()
    assert not list((door.root / "store").glob("*/*"))
    door.save(1)  # control


def test_refuses_when_a_mapping_could_still_write(short, monkeypatch):
    monkeypatch.setattr(store, "WRITER_MS", 100)
    path = short / "f"
    path.write_bytes(b"x" * 4096)
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 4096) as mapped:
        os.close(fd)
        with pytest.raises(Conflict, match=r"conflict\.open_writer"):
            store.close_off(path)
        mapped[0] = 1
    os.close(store.close_off(path))  # control
    assert path.stat().st_mode & 0o777 == 0o400


def test_the_guest_can_write_the_file_and_no_more(door):
    door.ready()
    save = door.begin(1)
    _, fd = door.ask_file("save_file", save=save, name="a.sealed")
    with as_uid(UID):
        if os.geteuid() != os.getuid():  # under root: the guest's uid is another one than the file's owner
            with pytest.raises(PermissionError):
                os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            with pytest.raises(PermissionError):
                os.listdir(door.root / "staging")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.read(fd, 1)
        os.write(fd, b"x")
    os.close(fd)


# --- the commit ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("end", ["stop", "lease", "close"])
def test_refuses_when_it_is_over_right_before_the_rename(door, monkeypatch, end):
    door.ready()
    old = door.save(1)
    save, real = door.begin(2), store.sync_folder
    door.file(save, "a.sealed", 2, w=b"x")

    def sync_folder(folder):
        real(folder)
        if folder == door.store.committed:  # the last step before the rename
            door.stop, door.over = (ALL if end == "stop" else None), end == "lease"
            if end == "close":
                door.close_run()

    monkeypatch.setattr(store, "sync_folder", sync_folder)
    with pytest.raises(Refusal) as refused:
        door.commit(save)
    door.until(lambda: door.staged() == [])
    monkeypatch.undo()
    door.stop, door.over = None, False
    assert refused.value.code == {"stop": "stopped", "lease": "stopped.lease", "close": "unavailable.broker"}[end]
    assert [p.name for p in (door.root / "store").glob("*/*")] == ["1-1"]
    door.keys() if end != "close" else door.ready(attempt=2)
    assert door.ask("load_begin")["digest"] == old  # control
    door.save(2)


def test_refuses_when_it_is_stopped_while_a_commit_waits_for_a_writer(door):
    door.ready()
    save = door.begin(2)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    seal(fd, reply, 2, w=b"x")
    failed = []

    def commit():
        try:
            door.commit(save)
        except Refusal as refused:
            failed.append(refused.code)

    asking = threading.Thread(target=commit)
    asking.start()
    time.sleep(0.15)
    assert door.ask("status")["state"] == "live"  # control: the loop goes on answering
    door.stop = ALL
    os.close(fd)
    asking.join(5)
    door.until(lambda: door.staged() == [])
    assert failed == ["stopped"]


def test_refuses_a_second_commit_while_one_is_at_work(door):
    door.ready()
    save = door.begin(1)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    seal(fd, reply, 1, w=b"x")
    found = []
    asking = threading.Thread(target=lambda: found.append(door.commit(save)))
    asking.start()
    time.sleep(0.1)
    for op, fields in (("save_commit", {"save": save, "items": 1}), ("save_begin", {"step": 2, "kind": "state"}),
                       ("save_abort", {"save": save})):
        with pytest.raises(Conflict, match=r"conflict\.saving"):
            door.ask(op, **fields)
    os.close(fd)
    asking.join(5)
    assert found[0]["digest"]  # control


def test_refuses_when_the_count_of_items_is_another(door):
    door.ready()
    save = door.begin(1)
    door.file(save, "a.sealed", 1, w=b"x", v=b"y")
    with pytest.raises(Untrusted, match=r"untrusted\.items"):
        door.commit(save, items=3)
    save = door.begin(1)
    door.file(save, "a.sealed", 1, w=b"x", v=b"y")
    assert door.commit(save, items=2)["digest"]  # control


def test_refuses_when_an_asset_is_not_where_it_should_be(door):
    door.ready()
    for assets in ({"config": "b.sealed"}, {"other": "a.sealed"}, {"config": 1}, ["config"]):
        save = door.begin(1, kind="weights")
        door.file(save, "a.sealed", 1, config=b"{}")
        with pytest.raises((Untrusted, Malformed)):
            door.commit(save, assets=assets)
    save = door.begin(1, kind="weights")
    door.file(save, "a.sealed", 1, config=b"{}")
    door.commit(save, assets={"config": "a.sealed"})
    assert door.ask("load_begin")["assets"] == {"config": "a.sealed"}  # control


@pytest.mark.parametrize("odd", ["extra", "missing"])
def test_refuses_when_the_staging_folder_holds_other_files(door, odd):
    door.ready()
    save = door.begin(1)
    door.file(save, "a.sealed", 1, w=b"x")
    path = _bytes_of(door)
    if odd == "extra":
        path.with_name("b.sealed").write_bytes(path.read_bytes())
    else:
        path.unlink()
    with pytest.raises(Untrusted, match=r"untrusted\.files"):
        door.commit(save)
    door.save(1)  # control


def test_refuses_when_a_checkpoint_is_empty(door):
    door.ready()
    with pytest.raises(Malformed, match=r"malformed\.files"):
        door.commit(door.begin(1), items=0)


def test_refuses_when_an_attempt_saves_a_step_twice(door):
    door.ready()
    first = door.save(1)
    with pytest.raises(Conflict, match=r"conflict\.step"):
        door.begin(1)
    door.close_run()
    door.ready(attempt=2)
    assert door.save(1) != first  # control: another attempt has a folder of its own
    assert sorted(p.name for p in (door.root / "store").glob("*/*")) == ["1-1", "1-2"]


def test_what_is_not_on_record_is_not_there(door):
    door.ready()
    old = door.save(1)
    door.full = {"checkpoint.committed"}
    with pytest.raises(NotRecorded):
        door.save(2)
    door.full = set()
    assert door.ask("load_begin")["digest"] == old
    assert door.staged() == []
    door.save(2)  # control


def test_refuses_what_could_not_be_listed_in_one_message():
    def made(count):
        names = [f"{n:03d}{'x' * 54}.sealed" for n in range(count)]
        rows = tuple(FileRow(n, 10**10, "sha256:" + "0" * 64, b"w" * 60) for n in names)
        return Manifest("run_" + "0" * 32, 1, 1, "state", None, 1, {}, rows)

    saving._require_listable(made(128))
    full = made(128)
    assets = {f"{n:02d}{'a' * 62}": full.files[0].name for n in range(64)}
    rows = tuple(FileRow(f.name, 10**8, f.digest, f.wrapped) for f in full.files)
    fat = Manifest(full.run, 1, 1, "weights", None, 1, assets, rows)
    with pytest.raises(Malformed, match=r"malformed\.wire"):
        saving._require_listable(fat)
    assert wire.LIMIT == 16 * 1024
