"""The supervisor's disk: durable before any effect, also when it is full, wiped or brought back."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from interlock.errors import Conflict, Unavailable
from interlock.order import Mode, ResumeOrder, Scope, StopOrder
from killswitch import latch
from killswitch.latchbook import SPARE_BYTES, SPARES, LatchBook, Latched
from killswitch.store import Entry, Store
from tests.killswitch.conftest import need_root
from tests.killswitch.site import Site, short_folder


def stop(id_: str = "stop_1", reason: str = "") -> Latched:
    return Latched(StopOrder(id_, Scope.parse("everything"), Mode.KILL, 1, "otto", reason), None, True, "b", 5)


def resume(*ids: str) -> Latched:
    return Latched(ResumeOrder("resume_1", 2, ids, "h", ()), None, True, "b", 6)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path / "supervisor")
    yield found
    found.close()


def reopen(store: Store) -> Store:
    store.close()
    return Store(store.folder)


def test_G17_a_latch_is_fsynced_before_it_returns(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, int]] = []
    real = os.fsync

    def spy(fd: int) -> None:
        real(fd)
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), len(list((store.folder / "orders").glob("*.stop")))))

    monkeypatch.setattr(os, "fsync", spy)
    store.book.latch_stop(stop())
    orders = str(store.folder / "orders")
    content = next(n for n, (path, _) in enumerate(synced) if "spare-" in path or path.endswith(".stop"))
    name = next(n for n, (path, stops) in enumerate(synced) if path == orders and stops == 1)
    assert content < name


def test_a_latch_survives_a_restart_and_a_resume_lifts_it(store: Store) -> None:
    store.book.latch_stop(stop())
    store.book.latch_stop(stop("stop/../2"))
    again = reopen(store)
    state, latched = again.load("node-a")
    assert set(state.stops) == {"stop_1", "stop/../2"}
    assert state.epoch == 3
    assert latched[0].local
    again.book.latch_resume(resume("stop_1"))
    last = reopen(again)
    state, _ = last.load("node-a")
    assert (set(state.stops), state.cleared, state.epoch) == ({"stop/../2"}, {"stop_1"}, 4)
    last.close()


def test_refuses_when_a_latch_cannot_be_read(store: Store) -> None:
    (store.folder / "orders" / "stop_9.stop").write_bytes(b"")
    (store.folder / "orders" / "resume_9.resume").write_bytes(b"{}")
    state, _ = store.load("node-a")
    found = state.stopped(Site().labels())
    assert found is not None
    assert (found.id, str(found.scope)) == ("stop_9", "node:node-a")


def test_G15_leases_are_never_on_disk_and_attempts_outlive_a_boot(store: Store) -> None:
    site = Site()
    store.register(Entry("run_1", 1, site.labels(), 1, "another-boot", {"unified": "/x"}))
    again = reopen(store)
    entry = again.entries()[0]
    assert entry.boot_id == "another-boot"
    text = (again.runs / "run_1.1.json").read_text()
    assert "deadline" not in text
    assert "lease" not in text
    with pytest.raises(Conflict):
        again.register(entry)
    again.close_entry(entry, "start")
    with pytest.raises(Conflict):
        again.register(entry)
    again.register(Entry("run_1", 2, site.labels(), 1, "b", {}))
    again.close()


def test_G16_complete_is_lost_with_the_orders(store: Store, tmp_path: Path) -> None:
    assert not store.complete
    store.set_complete(["old"], 7)
    assert store.complete
    assert store.load("node-a")[0].floor(Site().labels()) == 7
    backup = tmp_path / "backup"
    shutil.copytree(store.folder / "orders", backup)
    shutil.rmtree(store.folder / "orders")
    again = reopen(store)
    assert not again.complete
    again.close()
    shutil.rmtree(store.folder / "orders")
    shutil.copytree(backup, store.folder / "orders")
    assert not store.complete


def test_refuses_when_a_second_supervisor_starts(store: Store) -> None:
    with pytest.raises(Conflict) as caught:
        Store(store.folder)
    assert caught.value.code == "conflict.second_start"


def test_room_is_made_in_advance(store: Store) -> None:
    spares = list((store.folder / "orders").glob("spare-*"))
    assert len(spares) == SPARES
    assert all(s.stat().st_size == SPARE_BYTES for s in spares)
    for n in range(SPARES + 3):
        store.book.latch_stop(stop(f"stop_{n}"))
    assert len(list(store.book.stops("node-a"))) == SPARES + 3


@pytest.fixture
def small_disk() -> Iterator[Path]:
    need_root()
    folder = short_folder()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False)
    if done.returncode:
        folder.rmdir()
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def fill(folder: Path) -> None:
    with open(folder / "fill", "wb", buffering=0) as out, suppress(OSError):
        while True:
            out.write(bytes(4096))
    assert os.statvfs(folder).f_bavail == 0


@pytest.mark.root
def test_a_full_disk_still_latches_and_refuses_admission_and_resume(small_disk: Path) -> None:
    store = Store(small_disk / "supervisor")
    fill(small_disk)
    for n in range(5):
        store.book.latch_stop(stop(f"stop_{n}"))
    store.book.latch_stop(stop("stop_long", "x" * (SPARE_BYTES + 4096)))
    with pytest.raises(Unavailable) as caught:
        store.register(Entry("run_1", 1, Site().labels(), 1, "b", {}))
    assert caught.value.code == "unavailable.disk"
    with pytest.raises(OSError):
        store.book.latch_resume(resume("stop_0"))
    again = reopen(store)
    state, _ = again.load("node-a")
    assert {f"stop_{n}" for n in range(5)} <= set(state.stops)
    assert str(state.stops["stop_long"].scope) in ("everything", "node:node-a")
    again.close()


def test_a_book_without_spares_still_latches(tmp_path: Path) -> None:
    book = LatchBook(tmp_path / "orders")
    for spare in book.folder.glob("spare-*"):
        spare.unlink()
    book.latch_stop(stop())
    assert next(book.stops("n")).order.id == "stop_1"
    assert json.loads((book.folder / "stop_1.stop").read_text())["local"] is True


def test_G3_a_latch_file_is_one_stop_until_it_is_touched_again(tmp_path: Path) -> None:
    latch.drop(tmp_path, None)
    latch.drop(tmp_path, "run_7")
    (tmp_path / "STOP-un fit/../x".replace("/", "_")).touch()
    (tmp_path / "notes").touch()
    first = latch.look(tmp_path, "node-a")
    assert [str(f.scope) for f in first] == ["node:node-a", "run:run_7", "node:node-a"]
    assert latch.look(tmp_path, "node-a") == first
    latch.retire(tmp_path, "node-a", frozenset({first[0].id}))
    assert not (tmp_path / "STOP").exists()
    assert latch.look(tmp_path, "node-a") == first[1:]
    latch.drop(tmp_path, None)
    assert latch.look(tmp_path, "node-a")[0].id != first[0].id
    assert latch.look(tmp_path / "missing", "node-a") == []


def test_refuses_when_the_key_of_a_joined_node_is_gone(store: Store) -> None:
    key = store.folder / "supervisor.key"
    kept = key.read_bytes()
    (store.folder / "trust.json").write_text("{}")
    reopen(store).close()  # with its key it starts
    key.unlink()
    with pytest.raises(Conflict) as caught:
        Store(store.folder)
    assert caught.value.code == "conflict.half_made"
    assert str(key) in caught.value.next_step
    assert not key.exists(), "no other key is made in its place"
    assert kept
