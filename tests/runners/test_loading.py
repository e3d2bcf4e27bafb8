"""Loads: only what a verified manifest lists, only for whom it is, only while the lease lives."""

import os
import shutil
import threading
import time

import pytest

from interlock.call import Action
from interlock.errors import Denied, Halted, Malformed, NotFound, NotRecorded, Unavailable, Untrusted
from interlock.manifest import read, verify
from interlock.order import Mode, Scope, ScopeKind, StopOrder
from interlock.sealed import unwrap_file_key
from interlock.tier import Tier
from policy.snapshot import ModelRow
from runners import loading
from tests.runners.door import RUN_KEY, Door

OTHER_KEY = b"o" * 32
ALL = StopOrder("stop_1", Scope(ScopeKind.EVERYTHING), Mode.KILL, 1, "x", "")
STALE = StopOrder("stale", Scope(ScopeKind.EVERYTHING), Mode.KILL, 0, "stop-page", "")


@pytest.fixture
def door(short):
    found = Door(short)
    yield found
    found.close()


def _folder(door, name, run="run_1"):
    return door.root / "store" / run / name


def _rewrite(path, data):
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)


def _wait(condition):
    until = time.monotonic() + 3
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


# --- own checkpoints ----------------------------------------------------------------------------------

def test_the_newest_own_one_is_offered_and_any_step_by_its_number(door):
    door.ready()
    with pytest.raises(NotFound, match=r"not_found\.checkpoint"):
        door.ask("load_begin")
    door.save(2, w=b"two")
    door.save(10, w=b"ten")
    door.close_run()
    door.ready(attempt=2)
    door.save(2, w=b"two again")
    assert door.read(door.ask("load_begin")) == b"ten"  # by number, not by text
    assert door.read(door.ask("load_begin", step=2)) == b"two again"  # the later attempt
    with pytest.raises(NotFound, match=r"not_found\.checkpoint"):
        door.ask("load_begin", step=3)


def test_a_broken_one_is_told_once_and_the_older_one_offered(door):
    door.ready()
    old = door.save(1, w=b"old")
    door.save(2)
    good = (_folder(door, "2-1") / "manifest.json").read_bytes()
    _rewrite(_folder(door, "2-1") / "manifest.json", good.replace(b'"items":1', b'"items":2'))
    for _ in range(2):
        begun = door.ask("load_begin")
        assert begun["digest"] == old
    assert door.kinds().count("incident.raised") == 1
    incident = next(e for e in door.events if e.type.value == "incident.raised")
    assert incident.facts == {"attempt": 1, "code": "checkpoint", "refused": "untrusted.manifest", "step": 2,
                              "of_attempt": 1}
    with pytest.raises(NotFound):
        door.ask("load_begin", step=2)
    _rewrite(_folder(door, "2-1") / "manifest.json", good)
    assert door.ask("load_begin")["step"] == 2  # control


@pytest.mark.parametrize("how", ["gone", "shorter"])
def test_refuses_a_checkpoint_whose_files_are_not_there(door, how):
    door.ready()
    old = door.save(1)
    door.save(2)
    path = _folder(door, "2-1") / "a.sealed"
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        _rewrite(path, data[:-1])
    assert door.ask("load_begin")["digest"] == old
    if how == "gone":
        path.write_bytes(data)
    else:
        _rewrite(path, data)
    assert door.ask("load_begin")["step"] == 2  # control


def test_a_newer_checkpoint_that_was_taken_away_is_told(door):
    """Every byte that is left is authentic: only who knows of the newer one can tell."""
    def told():
        return [e.facts["refused"] for e in door.events if e.type.value == "incident.raised"]

    door.ready()
    door.save(1)
    door.save(2)
    door.keys(newest=(2, 1))
    assert door.ask("load_begin")["step"] == 2
    assert told() == []  # control
    shutil.rmtree(_folder(door, "2-1"))
    assert door.ask("load_begin", step=1)["step"] == 1
    assert told() == []  # asked for by its number: no more is promised
    for _ in range(2):
        assert door.ask("load_begin")["step"] == 1
    assert told() == ["untrusted.rollback"]
    shutil.rmtree(_folder(door, "1-1"))
    with pytest.raises(NotFound):
        door.ask("load_begin")


def test_refuses_when_a_manifest_lies_in_the_folder_of_another_step(door):
    door.ready()
    old = door.save(1)
    os.rename(_folder(door, "1-1"), _folder(door, "9-1"))
    with pytest.raises(NotFound):
        door.ask("load_begin")
    os.rename(_folder(door, "9-1"), _folder(door, "1-1"))
    assert door.ask("load_begin")["digest"] == old  # control


def test_refuses_when_another_key_wrote_the_manifest(door):
    door.ready()
    door.save(1)
    door.keys(run_key=OTHER_KEY)
    with pytest.raises(NotFound, match=r"not_found\.checkpoint"):
        door.ask("load_begin")
    door.keys()
    assert door.ask("load_begin")["step"] == 1  # control


def test_refuses_when_a_file_has_another_digest(door):
    door.ready()
    door.save(1, w=b"old")
    door.save(2, w=b"new")
    begun = door.ask("load_begin")
    path = _folder(door, "2-1") / "a.sealed"
    data = path.read_bytes()
    _rewrite(path, data[:-60] + bytes([data[-60] ^ 1]) + data[-59:])  # the size is the same
    with pytest.raises(Untrusted, match=r"untrusted\.digest"):
        door.read(begun)
    assert door.read(door.ask("load_begin")) == b"old"  # from now on the older one is offered
    assert door.kinds().count("incident.raised") == 1


def test_a_whole_file_is_not_read_twice_and_one_that_was_touched_is(door, monkeypatch):
    hashed = []
    honest = __import__("runners.store", fromlist=["_hash"])._hash
    monkeypatch.setattr("runners.store._hash", lambda fd: hashed.append(fd) or honest(fd))
    door.ready()
    door.save(1)
    begun = door.ask("load_begin")
    door.read(begun)
    assert hashed == []  # the commit read it whole
    os.utime(_folder(door, "1-1") / "a.sealed")
    door.read(begun)
    door.read(begun)
    assert len(hashed) == 1


def test_refuses_when_the_file_is_not_in_the_manifest_or_the_load_is_anothers(door):
    door.ready()
    door.ready("run_2")
    door.save(1)
    begun = door.ask("load_begin")
    (_folder(door, "1-1") / "b.sealed").write_bytes(b"x")
    with pytest.raises(NotFound, match=r"not_found\.file"):
        door.read(begun, "b.sealed")
    with pytest.raises(NotFound, match=r"not_found\.file"):
        door.read(begun, "manifest.json")
    with pytest.raises(NotFound, match=r"not_found\.load"):
        door.read(begun, run="run_2")
    with pytest.raises(NotFound, match=r"not_found\.checkpoint"):
        door.ask("load_begin", "run_2")
    assert door.read(begun) == b"weights"  # control


def test_the_descriptor_only_reads(door):
    door.ready()
    door.save(1)
    _, fd = door.ask_file("load_file", load=door.ask("load_begin")["load"], name="a.sealed")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)


def test_refuses_when_the_gate_says_no_or_nothing_is_on_record(door):
    door.ready()
    door.save(1)
    door.view.denied = {Action.LOAD}
    with pytest.raises(Denied, match=r"denied\.no_match"):
        door.ask("load_begin")
    door.view.denied, door.full = set(), {"checkpoint.loaded"}
    with pytest.raises(NotRecorded):
        door.ask("load_begin")
    door.full = set()
    door.ask("load_begin")  # control


@pytest.mark.parametrize("over", [False, True])
def test_refuses_when_it_is_stopped_while_the_file_is_read(door, monkeypatch, over):
    door.ready()
    door.save(1)
    begun = door.ask("load_begin")
    honest = door.store.digest_of

    def slow(fd):
        door.stop, door.over = (None, True) if over else (STALE, False)
        return honest(fd)

    monkeypatch.setattr(door.store, "digest_of", slow)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Halted):
        door.ask_file("load_file", load=begun["load"], name="a.sealed")
    _wait(lambda: len(os.listdir("/proc/self/fd")) <= before)  # the descriptor is closed, and the connection
    monkeypatch.setattr(door.store, "digest_of", honest)
    door.stop, door.over = None, False
    door.keys()
    assert door.read(begun) == b"weights"  # control


def test_the_end_of_an_attempt_drops_its_loads(door):
    door.ready()
    door.save(1)
    begun = door.ask("load_begin")
    door.close_run()
    door.ready()
    with pytest.raises(NotFound, match=r"not_found\.load"):
        door.read(begun)


def test_only_so_many_loads_stay_begun(door, monkeypatch):
    monkeypatch.setattr(loading, "OPEN", 2)
    door.ready()
    door.save(1)
    begun = [door.ask("load_begin") for _ in range(3)]
    with pytest.raises(NotFound):
        door.read(begun[0])
    assert door.read(begun[1]) == door.read(begun[2]) == b"weights"


# --- versions of others -------------------------------------------------------------------------------

def _version(door):
    """Commit a checkpoint of run_1; return its digest and its file keys as the control plane would release them."""
    door.ready()
    digest = door.save(3, kind="weights", w=b"parent")
    manifest = verify((_folder(door, "3-1") / "manifest.json").read_bytes(), RUN_KEY)
    return digest, {f.name: unwrap_file_key(RUN_KEY, f.wrapped, "run_1", 3, f.name) for f in manifest.files}


def test_another_run_loads_a_version_that_its_plan_names(door):
    digest, keys = _version(door)
    door.view.models = (ModelRow("minilm", "lab", Tier.HIGH, digest, "approved", ("grand",)),)
    door.open("run_2", checkpoints=False, weights=[digest])
    with pytest.raises(Unavailable, match=r"unavailable\.keys"):
        door.ask("load_begin", "run_2", version=digest)
    assert door.keys("run_2", run_key=None, files={digest: keys}) == {"ok": True}
    begun = door.ask("load_begin", "run_2", version=digest)
    assert (begun["run"], begun["step"], begun["digest"]) == ("run_1", 3, digest)
    assert door.read(begun, run="run_2") == b"parent"
    call, facts = door.view.calls[-1]
    assert (call.resource.path, call.resource.tier, call.resource.ancestors) == ("model/minilm", Tier.HIGH, ("grand",))
    assert (call.action, call.run, facts.own) == (Action.LOAD, "run_2", False)
    with pytest.raises(Denied, match=r"denied\.plan"):
        door.ask("load_begin", "run_2")  # it has no checkpoints of its own
    with pytest.raises(Denied, match=r"denied\.plan"):
        door.begin(1, "run_2")


def test_a_version_that_is_not_offered_goes_by_its_plan_or_its_digest(door):
    digest, keys = _version(door)
    door.open("run_2", weights=[digest], model="child")
    door.open("run_3", weights=[digest], model="parent", serve=True, checkpoints=False)
    for run, path in (("run_2", f"model/{digest}"), ("run_3", "model/parent")):
        door.keys(run, files={digest: keys})
        door.ask("load_begin", run, version=digest)
        assert door.view.calls[-1][0].resource.path == path


def test_refuses_when_the_plan_does_not_name_the_version(door):
    digest, keys = _version(door)
    other = "sha256:" + "1" * 64
    door.open("run_2", weights=[other])
    door.keys("run_2", files={digest: keys, other: keys})
    with pytest.raises(Denied, match=r"denied\.version"):
        door.ask("load_begin", "run_2", version=digest)
    with pytest.raises(NotFound, match=r"not_found\.version"):
        door.ask("load_begin", "run_2", version=other)
    with pytest.raises(Malformed):
        door.ask("load_begin", "run_2", version=other, step=1)
    door.open("run_3", weights=[digest])
    door.keys("run_3", files={digest: keys})
    door.ask("load_begin", "run_3", version=digest)  # control


def test_refuses_when_the_gate_denies_the_version(door):
    digest, keys = _version(door)
    door.open("run_2", weights=[digest])
    door.keys("run_2", files={digest: keys})
    door.view.denied = {Action.LOAD}
    with pytest.raises(Denied, match=r"denied\.no_match"):
        door.ask("load_begin", "run_2", version=digest)
    door.view.denied = set()
    door.ask("load_begin", "run_2", version=digest)  # control


def test_refuses_when_the_manifest_of_a_version_was_changed(door):
    digest, keys = _version(door)
    door.open("run_2", weights=[digest])
    door.keys("run_2", files={digest: keys})
    assert door.ask("load_begin", "run_2", version=digest)  # control, and it is in the index from now on
    path = _folder(door, "3-1") / "manifest.json"
    _rewrite(path, path.read_bytes().replace(b'"items":1', b'"items":2'))
    with pytest.raises(Untrusted, match=r"untrusted\.digest"):
        door.ask("load_begin", "run_2", version=digest)
    assert read(path.read_bytes()).items == 2


# --- keys ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("end", ["close", "stop", "lease"])
def test_keys_are_forgotten_when_it_is_over(door, end):
    door.ready()
    door.ready("run_2")
    held = door.vault._held["run_1", 1].run_key
    assert bytes(held) == RUN_KEY
    if end == "close":
        door.close_run()
    door.stop, door.over = (ALL if end == "stop" else None), end == "lease"
    _wait(lambda: ("run_1", 1) not in door.vault.held())
    assert bytes(held) == bytes(32)  # overwritten, not only dropped
    assert (("run_2", 1) in door.vault.held()) is (end == "close")  # control
    door.stop, door.over = None, False


def test_a_stop_page_that_nobody_refreshes_takes_no_keys(door):
    door.ready()
    door.stop = STALE
    with pytest.raises(Halted):
        door.ask("load_begin")
    time.sleep(1.2)
    door.stop = None
    door.begin(1)


def test_refuses_keys_that_are_none_and_says_nothing_of_them(door):
    door.open()
    for request in ({"run_key": "c2hvcnQ=", "files": {}}, {"run_key": None, "files": []}, {"run_key": 5, "files": {}},
                    {"run_key": None, "files": {"v": {"a": "***secret***"}}}):
        said = door.say({"op": "keys", "run": "run_1", "attempt": 1, **request})
        assert said["error"]["code"] == "malformed.keys"
        assert "secret" not in str(said)
    assert door.keys("run_9")["error"]["code"] == "not_found.guest"
    assert door.keys() == {"ok": True}  # control


def test_many_loads_at_once_are_all_answered(door):
    door.ready()
    door.save(1, w=os.urandom(200_000))
    begun = door.ask("load_begin")
    found = []
    threads = [threading.Thread(target=lambda: found.append(len(door.read(begun)))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [200_000] * 12
