"""What a guest can still write is bounded: by save, by run, by disk; and nothing dropped keeps its bytes."""

import os
import shutil
import socket
import subprocess
import time

import pytest

from interlock.errors import Conflict, Denied, Malformed, Unavailable
from runners import broker, open_files, saving, store
from runners.early_proof import Early
from runners.open_files import OpenFiles
from tests.runners.door import UID, Door, as_uid, seal

MB = 1 << 20


@pytest.fixture
def door(short, monkeypatch):
    monkeypatch.setattr(broker, "KEYS_MS", 20)
    found = Door(short).ready()
    yield found
    found.close()


def _limit(monkeypatch, door, name, size):
    """Set a share of the disk so that it is about `size` bytes."""
    disk = os.statvfs(door.root)
    monkeypatch.setattr(store, name, disk.f_blocks * disk.f_frsize // size)


@pytest.fixture
def read(monkeypatch):
    """The names of the files that a commit reads; nothing is proven before it."""
    seen = []
    real = saving.Saving._prove

    def spy(self, guest, save, name, run_key, *wait_ms):
        if not wait_ms:
            seen.append(name)
        return real(self, guest, save, name, run_key, *wait_ms)

    monkeypatch.setattr(saving.Saving, "_prove", spy)
    monkeypatch.setattr(Early, "add", lambda *_: None)
    return seen


@pytest.mark.parametrize("how", ["sparse", "written", "allocated"])
def test_a_save_that_outgrows_its_budget_is_dropped_and_keeps_no_bytes(door, monkeypatch, how):
    _limit(monkeypatch, door, "SAVE_SHARE", MB)
    save = door.begin(1)
    _, fd = door.ask_file("save_file", save=save, name="a.sealed")
    if how == "sparse":
        os.ftruncate(fd, 1 << 40)
    elif how == "written":
        os.write(fd, b"x" * (2 * MB))
    else:
        os.posix_fallocate(fd, 0, 2 * MB)
    door.until(lambda: os.fstat(fd).st_size == 0)
    for op, fields in (("save_file", {"name": "b.sealed"}), ("save_commit", {"items": 1})):
        with pytest.raises(Denied, match=r"denied\.budget"):
            door.ask(op, save=save, **fields)
    assert door.staged() == []
    os.pwrite(fd, b"x" * 4096, 1 << 30)  # whoever holds on to it fills no disk
    door.until(lambda: os.fstat(fd).st_size == 0)
    os.close(fd)
    refused = [e.facts for e in door.events if e.type.value == "checkpoint.refused"]
    assert refused[0]["code"] == "denied.budget"
    assert door.ask("save_abort", save=save) == {}
    assert door.save(1, w=b"x" * (MB // 2))  # control


def test_refuses_a_commit_of_too_much_before_anything_is_read(door, monkeypatch, read):
    _limit(monkeypatch, door, "SAVE_SHARE", MB)
    save = door.begin(1)
    monkeypatch.setattr(saving.Saving, "look", lambda _: [])
    for name in ("a.sealed", "b.sealed"):
        _, fd = door.ask_file("save_file", save=save, name=name)
        os.ftruncate(fd, MB * 3 // 4)
        os.close(fd)
    with pytest.raises(Denied, match=r"denied\.budget"):
        door.commit(save)
    assert read == []
    assert door.staged() == []
    door.save(2)  # control
    assert read == ["a.sealed"]


def test_a_file_that_is_too_large_alone_is_not_proven_early(door, monkeypatch):
    _limit(monkeypatch, door, "SAVE_SHARE", MB)
    monkeypatch.setattr(saving.Saving, "look", lambda _: [])
    read, real = [], saving.wrapped_of
    monkeypatch.setattr(saving, "wrapped_of", lambda fd: read.append(os.fstat(fd).st_size) or real(fd))
    save = door.begin(1)
    _, fd = door.ask_file("save_file", save=save, name="a.sealed")
    os.ftruncate(fd, 2 * MB)
    os.close(fd)
    door.file(save, "b.sealed", 1, w=b"x")
    door.until(lambda: read)  # control
    time.sleep(0.1)
    with pytest.raises(Denied, match=r"denied\.budget"):
        door.commit(save)
    assert max(read) < MB


def test_no_file_is_read_while_another_one_can_be_written(door, monkeypatch, read):
    monkeypatch.setattr(store.close_off, "__defaults__", (50,))
    save = door.begin(1)
    _, fd = door.ask_file("save_file", save=save, name="b.sealed")
    door.file(save, "a.sealed", 1, w=b"x")
    assert read == []
    with pytest.raises(Conflict, match=r"conflict\.open_writer"):
        door.commit(save)
    assert read == []
    os.close(fd)
    door.save(1)  # control
    assert read == ["a.sealed"]


def test_a_run_keeps_its_share_of_the_disk_and_no_more(door, monkeypatch):
    _limit(monkeypatch, door, "RUN_SHARE", MB)
    door.save(1, w=b"x" * (MB * 2 // 3))
    with pytest.raises(Denied, match=r"denied\.budget"):
        door.save(2, w=b"x" * (MB * 2 // 3))  # the next one has what is left
    door.save(3, w=b"x" * (MB // 4))
    door.save(4, w=b"x" * (MB // 16))
    monkeypatch.setattr(store, "RUN_FILES", 6)  # two a step
    with pytest.raises(Denied, match=r"denied\.budget"):
        door.begin(5)
    shutil.rmtree(door.root / "store" / "run_1" / "1-1")
    with pytest.raises(Denied, match=r"denied\.budget"):
        door.begin(5)  # it is not counted at each try
    monkeypatch.setattr(store, "COUNT_AGAIN_MS", 0)
    door.save(5, w=b"x" * (MB // 2))  # control
    monkeypatch.setattr(store, "RUN_FILES", 100)
    assert store.Store(door.root).allowance("run_1") == door.store.allowance("run_1")  # a restart counts the same


def test_the_largest_save_goes_when_the_disk_is_nearly_full(door, monkeypatch):
    door.ready("run_2")
    saves, fds = [door.begin(1), door.begin(1, "run_2")], []
    for run, save, size in (("run_1", saves[0], 10), ("run_2", saves[1], MB)):
        _, fd = door.ask_file("save_file", run, save=save, name="a.sealed")
        os.write(fd, b"x" * size)
        fds.append(fd)
    disk = list(os.statvfs(door.root))
    disk[4] = 0
    real = os.statvfs

    def once(path):  # nearly full until something went
        full = os.fstat(fds[1]).st_size > 0
        return os.statvfs_result(tuple(disk)) if full else real(path)

    monkeypatch.setattr(store.os, "statvfs", once)
    door.until(lambda: os.fstat(fds[1]).st_size == 0)
    with pytest.raises(Unavailable, match=r"unavailable\.disk"):
        door.ask("save_file", "run_2", save=saves[1], name="b.sealed")
    door.file(saves[0], "b.sealed", 1, w=b"x")  # control: the other one goes on
    for fd in fds:
        os.close(fd)


def test_refuses_when_few_inodes_are_left(door, monkeypatch):
    disk = list(os.statvfs(door.root))
    for left, refused in ((1, True), (500, False)):  # the second is the control
        disk[5:8] = 1000, left, left
        with monkeypatch.context() as patch:
            patch.setattr(store.os, "statvfs", lambda _, rows=tuple(disk): os.statvfs_result(rows))
            if refused:
                with pytest.raises(Unavailable, match=r"unavailable\.disk"):
                    door.begin(1)
            else:
                door.begin(1)


def test_refuses_a_save_while_too_many_files_of_dropped_ones_are_open(door, monkeypatch):
    monkeypatch.setattr(saving, "LEFT", 2)
    held = []
    for step in (1, 2):
        _, fd = door.ask_file("save_file", save=door.begin(step), name="a.sealed")
        os.write(fd, b"x" * 4096)
        held.append(fd)
    save = door.begin(3)
    door.until(lambda: not any(os.fstat(fd).st_size for fd in held))
    door.file(save, "a.sealed", 3, w=b"x")
    assert door.commit(save)["digest"]
    with pytest.raises(Conflict, match=r"conflict\.open_writer"):
        door.begin(4)
    os.close(held.pop())
    door.begin(4)  # control
    os.close(held.pop())


def test_refuses_more_items_than_a_checkpoint_may_have(door, monkeypatch):
    monkeypatch.setattr(saving, "MAX_ITEMS", 3)
    save = door.begin(1)
    door.file(save, "a.sealed", 1, u=b"", v=b"")
    door.file(save, "b.sealed", 1, w=b"", x=b"")
    with pytest.raises(Malformed, match=r"malformed\.items"):
        door.commit(save, items=4)
    assert door.save(2, u=b"", v=b"", w=b"")  # control


def test_the_end_of_an_attempt_lets_go_of_every_file(door):
    before = len(os.listdir("/proc/self/fd"))
    save = door.begin(1)
    _, fd = door.ask_file("save_file", save=save, name="a.sealed")
    _, held = door.ask_file("save_file", save=save, name="b.sealed")
    door.close_run()
    os.close(fd)
    os.close(held)
    assert len(os.listdir("/proc/self/fd")) < before  # the listening socket went too


def test_only_a_file_without_a_name_is_emptied(short):
    path, files = short / "f", OpenFiles()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, b"kept")
    files.add(path)
    files.leave()
    assert (files.empty(), os.fstat(fd).st_size) == (1, 4)
    path.unlink()
    assert (files.empty(), os.fstat(fd).st_size) == (1, 0)  # control
    os.close(fd)
    assert files.empty() == 0
    assert open_files.lease is store.lease


@pytest.mark.parametrize("way", ["duplicate", "in flight", "child"])
def test_refuses_when_a_writer_is_kept_anywhere(door, monkeypatch, way):
    monkeypatch.setattr(store.close_off, "__defaults__", (50,))
    save = door.begin(1)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    seal(fd, reply, 1, w=b"x")
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    child, kept = None, -1
    if way == "duplicate":
        kept = os.dup(fd)
    elif way == "in flight":
        socket.send_fds(ours, [b"x"], [fd])
    else:
        child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, pass_fds=[fd])
    os.close(fd)
    with pytest.raises(Conflict, match=r"conflict\.open_writer"):
        door.commit(save)
    if kept >= 0:
        os.close(kept)
    if child:
        child.communicate(timeout=5)
    ours.close()
    theirs.close()
    door.save(1)  # control


def test_a_descriptor_that_only_names_the_file_opens_nothing(door):
    save = door.begin(1)
    reply, fd = door.ask_file("save_file", save=save, name="a.sealed")
    seal(fd, reply, 1, w=b"x")
    named = os.open(f"/proc/self/fd/{fd}", os.O_PATH)
    os.close(fd)
    assert door.commit(save)["digest"]  # it is no writer
    with as_uid(UID):
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDONLY):
            if os.geteuid() != os.getuid():
                with pytest.raises(PermissionError):
                    os.open(f"/proc/self/fd/{named}", flags)
        with pytest.raises(OSError, match=r"not permitted|cross-device|denied|No such"):
            os.link(f"/proc/self/fd/{named}", door.short / "mine", follow_symlinks=True)
    os.close(named)
