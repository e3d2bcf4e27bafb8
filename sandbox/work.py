"""The writable disk of a run: one tmpfs with a size, an inode limit and no swap, mounted where the host can
read it after the run has ended.

`RUNTIME/runs/ID/disk` holds the three parts `work`, `tmp` and `shm`. Mount points that bubblewrap leaves
in `work` (the masked names) are removed by `tidy`, so a workspace shows no litter. What a run wrote is
hostile: `runners/collector.py` opens it without following links; this file never looks into it.
"""

import ctypes
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from interlock.errors import Conflict, LayerMissing
from sandbox.profile import Profile

PARTS = ("work", "tmp", "shm")
_NOSUID, _NODEV, _DETACH, _NOFOLLOW = 2, 4, 2, 8

_libc = ctypes.CDLL(None, use_errno=True)


def _mount_tmpfs(target: Path, options: str) -> None:
    flags = ctypes.c_ulong(_NOSUID | _NODEV)
    if _libc.mount(b"tmpfs", str(target).encode(), b"tmpfs", flags, options.encode()) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _unmount(target: Path) -> bool:
    return int(_libc.umount2(str(target).encode(), _DETACH | _NOFOLLOW)) == 0


def _swap_is_on() -> bool:
    return len(Path("/proc/swaps").read_text().splitlines()) > 1


@dataclass(frozen=True)
class Disk:
    """A mounted disk of the run `id`. `work` is what a collector reads."""

    id: str
    folder: Path

    @property
    def path(self) -> Path:
        """Return the root of the tmpfs."""
        return self.folder / "disk"

    @property
    def work(self) -> Path:
        """Return the folder that the run saw as /work."""
        return self.path / "work"

    def tidy(self, profile: Profile) -> None:
        """Remove the empty mount points of masked names; call after the run is dead, before collecting."""
        for name in profile.shape.protected:
            with suppress(OSError):
                os.rmdir(self.work / name)

    def remove(self) -> None:
        """Unmount and remove everything; idempotent. Raises OSError when it cannot."""
        _clear(self.folder)


def _clear(folder: Path) -> None:
    while _unmount(folder / "disk"):
        continue
    if folder.is_dir() and not os.path.ismount(folder / "disk"):
        shutil.rmtree(folder)  # what is left is ours: the socket and the code of the run


def mount(runtime: Path, id_: str, profile: Profile) -> Disk:
    """Mount the disk of one run (`id_` is RUN.ATTEMPT); all or nothing.

    Raises LayerMissing (``layer_missing.disk``) when it cannot be mounted, or when the shape forbids swap,
    swap is on and the kernel has no ``noswap`` (older than 6.4).
    """
    disk = Disk(id_, runtime / "runs" / id_)
    disk.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        disk.path.mkdir(mode=0o755)
    except FileExistsError:
        raise Conflict(f"run {id_} has a disk already", code="attempt", next_step="use a new attempt") from None
    options = f"size={profile.bounds.work_mb}m,nr_inodes={profile.bounds.inodes},mode=0755"
    try:
        try:
            _mount_tmpfs(disk.path, options + ",noswap")
        except OSError:
            if not profile.shape.swap and _swap_is_on():
                raise
            _mount_tmpfs(disk.path, options)
        for part in PARTS:
            (disk.path / part).mkdir(mode=0o700)
            os.chown(disk.path / part, profile.uid, profile.uid)
    except OSError as error:
        disk.remove()
        raise LayerMissing(
            f"the disk of the run cannot be mounted: {error.strerror}", code="disk",
            next_step="run as root; with swap on use kernel 6.4 or newer, or swapoff -a",
        ) from None
    return disk


def leftovers(runtime: Path) -> list[Disk]:
    """Return disks that an earlier program left below `runtime`."""
    folder = runtime / "runs"
    return [Disk(p.name, p) for p in sorted(folder.iterdir()) if p.is_dir()] if folder.is_dir() else []


def remove_leftovers(runtime: Path, keep: frozenset[str] = frozenset()) -> int:
    """Remove the disks of runs that are not in `keep`; call at start, after every old run is dead.

    Returns how many were removed.
    """
    gone = [disk for disk in leftovers(runtime) if disk.id not in keep]
    for disk in gone:
        disk.remove()
    return len(gone)
