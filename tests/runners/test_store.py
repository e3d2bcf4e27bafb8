"""The store's folders: whole or not at all, never over another, and what dead attempts left goes."""

import os
import signal
from pathlib import Path

import pytest

from interlock.errors import Conflict, NotFound, Refusal, Untrusted
from interlock.manifest import FileRow, Manifest, verify
from interlock.sealed import Writer, wrap_file_key
from runners import store
from runners.store import Store, read_manifest

KEY, FILE_KEY, RUN = b"r" * 32, b"f" * 32, "run_1"
NAMES = {"a.sealed", "b.sealed"}


def _fill(made: Store, step: int, attempt: int = 1):
    """Return a filled staging folder and its manifest."""
    staging = made.begin(RUN, attempt)
    rows = []
    for name in sorted(NAMES):
        fd = staging.create(name)
        wrapped = wrap_file_key(KEY, FILE_KEY, RUN, step, name)
        writer = Writer(fd, FILE_KEY, wrapped, RUN, step, 65_536)
        writer.add("w", (), str(step).encode() * 100)
        writer.finish()
        os.close(fd)
        fd = store.close_off(staging.folder / name)
        rows.append(FileRow(name, os.fstat(fd).st_size, made.digest_of(fd), wrapped))
        os.close(fd)
    return staging, Manifest(RUN, step, attempt, "state", None, 2, {}, tuple(rows))


def _commit(made: Store, step: int, attempt: int = 1, last=lambda: None) -> Manifest:
    staging, manifest = _fill(made, step, attempt)
    made.commit(staging, made.place(RUN, step, attempt), NAMES, manifest.seal(KEY), last)
    return manifest


def _loads(root: Path) -> list[int]:
    """Return the steps that a broker which starts now finds whole."""
    fresh = Store(root)
    fresh.sweep()
    assert os.listdir(root / "staging") == []
    found = []
    for kept in fresh.kept(RUN):
        manifest = verify(read_manifest(kept.folder), KEY)  # whatever has its place must be whole
        for row in manifest.files:
            fd = store.open_kept(kept.folder, row.name, row.size)
            assert fresh.digest_of(fd) == row.digest
            os.close(fd)
        found.append(manifest.step)
    return found


def _killed_at(root: Path, point: int) -> bool:
    """Commit step 2 in a child that SIGKILLs itself right before its `point`-th durable call; returns whether it
    came that far."""
    made = Store(root)
    staging, manifest = _fill(made, 2)
    place, data = made.place(RUN, 2, 1), manifest.seal(KEY)
    child = os.fork()
    if child == 0:
        left = point

        def guarded(honest):
            def call(*args):
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return honest(*args)

            return call

        try:
            for name in ("fsync", "rename", "mkdir", "open"):
                setattr(os, name, guarded(getattr(os, name)))
            made.commit(staging, place, NAMES, data, lambda: None)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_kill_at_any_point_leaves_the_old_one_and_the_new_one_whole_or_not_at_all(short):
    outcomes, point = [], 1
    while True:
        root = short / str(point)
        _commit(Store(root), 1)
        killed = _killed_at(root, point)
        outcomes.append(_loads(root))
        if not killed:
            break
        point += 1
    assert point > 12
    assert outcomes[-1] == [2, 1]
    assert all(o in ([1], [2, 1]) for o in outcomes)
    assert [1] in outcomes[:-1]
    assert [2, 1] in outcomes[:-1]  # after the rename, before its parents were synced


def test_a_step_is_never_written_over(short):
    made = Store(short)
    first = _commit(made, 1)
    with pytest.raises(Conflict, match=r"conflict\.step"):
        made.place(RUN, 1, 1)
    staging, other = _fill(made, 1)
    place = short / "store" / RUN / "1-1"  # as if both had asked for the place at once
    with pytest.raises(Conflict, match=r"conflict\.step"):
        made.commit(staging, place, NAMES, other.seal(KEY), lambda: None)
    assert verify(read_manifest(place), KEY).digest() == first.digest()
    _commit(made, 1, attempt=2)  # control


def test_a_refusal_of_the_last_question_leaves_all_as_it_was(short):
    made = Store(short)

    def no():
        raise Untrusted("no")

    with pytest.raises(Untrusted):
        _commit(made, 1, last=no)
    assert made.kept(RUN) == []
    _commit(made, 1)  # control


def test_the_order_is_by_number_and_odd_names_are_nothing(short):
    made = Store(short)
    for step, attempt in ((9, 1), (10, 1), (9, 2)):
        _commit(made, step, attempt)
    for odd in ("x", "1", "1-0", "01-", "1-1.tmp", "-1-1"):
        (short / "store" / RUN / odd).mkdir()
    assert [(k.step, k.attempt) for k in made.kept(RUN)] == [(10, 1), (9, 2), (9, 1)]
    assert made.kept("run_none") == []


def test_staging_of_one_run_or_of_all_is_swept(short):
    made = Store(short)
    made.begin("run_1", 1)
    made.begin("run_10", 1)
    made.sweep("run_1")
    assert [n.split(".")[0] for n in os.listdir(short / "staging")] == ["run_10"]
    made.sweep()
    assert os.listdir(short / "staging") == []


def test_a_version_is_found_by_its_digest_of_any_run_and_after_a_restart(short):
    made = Store(short)
    first, second = _commit(made, 1), _commit(made, 2)
    (short / "store" / "run_odd" / "1-1").mkdir(parents=True)
    (short / "store" / "run_odd" / "1-1" / "manifest.json").write_bytes(b"{}")
    assert made.find(first.digest()).name == "1-1"
    assert Store(short).find(second.digest()).name == "2-1"
    third = _commit(made, 3)
    assert made.find(third.digest()).name == "3-1"
    with pytest.raises(NotFound, match=r"not_found\.version"):
        made.find("sha256:" + "0" * 64)
    os.rename(short / "store" / RUN / "1-1", short / "gone")
    with pytest.raises(NotFound):
        made.find(first.digest())


def test_a_link_in_place_of_a_file_or_manifest_is_not_followed(short):
    made = Store(short)
    _commit(made, 1)
    folder = made.kept(RUN)[0].folder
    size = (folder / "a.sealed").stat().st_size
    for name in ("a.sealed", "manifest.json"):
        os.rename(folder / name, short / name)
        (folder / name).symlink_to(short / name)
    with pytest.raises(Untrusted):
        store.open_kept(folder, "a.sealed", size)
    with pytest.raises(OSError, match="symbolic links"):
        read_manifest(folder)
    with pytest.raises(Refusal):
        store.open_kept(folder, "b.sealed", size + 1)
    os.close(store.open_kept(folder, "b.sealed", size))  # control
