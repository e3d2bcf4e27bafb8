"""The disk of a run: bounded in bytes and inodes, unmounted for good, left-overs removed at start."""

import errno
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from interlock.errors import Conflict, LayerMissing
from sandbox import work

from .conftest import MakeProfile

pytestmark = pytest.mark.root


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def test_bytes_and_inodes_are_bounded_over_all_parts(make_profile: MakeProfile, runtime: Path) -> None:
    profile = make_profile(work_mb=2)
    profile = replace(profile, bounds=replace(profile.bounds, inodes=60))
    disk = work.mount(runtime, "run_1.1", profile)
    try:
        with pytest.raises(OSError) as caught:
            (disk.path / "shm/big").write_bytes(b"x" * (3 << 20))
        assert caught.value.errno == errno.ENOSPC
        (disk.path / "shm/big").unlink()
        made = 0
        with suppress(OSError):
            for made in range(100):  # noqa: B007
                (disk.path / "tmp" / str(made)).touch()
        assert 40 < made < 60
        assert os.stat(disk.work).st_uid == profile.uid
        assert os.stat(disk.work).st_mode & 0o777 == 0o700
    finally:
        disk.remove()
    assert list((runtime / "runs").iterdir()) == []
    assert str(runtime) not in mounts()
    disk.remove()


def test_tidy_removes_mount_points_and_nothing_that_a_run_made(make_profile: MakeProfile, runtime: Path) -> None:
    profile = make_profile()
    disk = work.mount(runtime, "run_1.1", profile)
    try:
        (disk.work / ".git").mkdir()
        (disk.work / ".github").mkdir()
        (disk.work / ".github/kept").touch()
        (disk.work / ".idea").symlink_to("/etc")
        disk.tidy(profile)
        assert sorted(os.listdir(disk.work)) == [".github", ".idea"]
    finally:
        disk.remove()


def test_left_overs_are_removed_and_kept_runs_are_not(make_profile: MakeProfile, runtime: Path) -> None:
    old, kept = (work.mount(runtime, n, make_profile()) for n in ("old_1.1", "kept_1.1"))
    (old.folder / "broker.sock").touch()
    assert work.remove_leftovers(runtime, frozenset({"kept_1.1"})) == 1
    assert not old.folder.exists()
    assert kept.work.is_dir()
    assert work.remove_leftovers(runtime) == 1
    assert str(runtime) not in mounts()


def test_refuses_when_the_attempt_has_a_disk_already(make_profile: MakeProfile, runtime: Path) -> None:
    disk = work.mount(runtime, "run_1.1", make_profile())
    try:
        with pytest.raises(Conflict) as caught:
            work.mount(runtime, "run_1.1", make_profile())
        assert caught.value.code == "conflict.attempt"
        assert disk.work.is_dir()
    finally:
        disk.remove()


def test_refuses_when_swap_could_take_what_strict_forbids(
    make_profile: MakeProfile, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = work._mount_tmpfs

    def old_kernel(target: Path, options: str) -> None:
        if "noswap" in options:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(target, options)

    monkeypatch.setattr(work, "_mount_tmpfs", old_kernel)
    work.mount(runtime, "off_1.1", make_profile()).remove()
    monkeypatch.setattr(work, "_swap_is_on", lambda: True)
    with pytest.raises(LayerMissing) as caught:
        work.mount(runtime, "on_1.1", make_profile())
    assert caught.value.code == "layer_missing.disk"
    assert list((runtime / "runs").iterdir()) == []
