"""The broker's folders of checkpoints: staging, one rename, and never an overwrite.

    STATE/broker/staging/RUN.ATTEMPT.ID/     0700; files that the broker made and a guest fills by a descriptor
    STATE/broker/store/RUN/STEP-ATTEMPT/     0700; the same files, 0400, and manifest.json

Order of a commit, each step durable before the next: files, manifest (last in its folder), staging folder, the
run's folder, rename, both parents. Whatever is cut in between: a step is there whole or not at all.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from interlock.durable import sync_folder
from interlock.errors import Conflict, Denied, NotFound, Refusal, Unavailable, Untrusted
from interlock.manifest import MAX_BYTES, read
from interlock.permit import boottime_ms

MANIFEST = "manifest.json"
ROOM_BYTES, ROOM_SHARE = 1 << 30, 20  # free: 1 GiB, and one twentieth of the disk and of its inodes
SAVE_SHARE, RUN_SHARE = 4, 2  # one save takes at most a quarter of the disk, one run keeps at most half of it
RUN_FILES = 200_000
COUNT_AGAIN_MS = 60_000
WRITER_MS = 2_000
_PIECE = 1 << 20
_STEP = re.compile(r"(\d{1,16})-([1-9]\d{0,4})")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Staging:
    """The folder of one open save."""

    folder: Path

    def create(self, name: str) -> int:
        """Make the empty file `name` and return a descriptor for writing; raises OSError."""
        return os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def names(self) -> set[str]:
        """Return what lies in the folder."""
        return set(os.listdir(self.folder))

    def drop(self) -> None:
        """Take the folder away; one that has moved into the store is no error."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class Kept:
    """One committed step, unverified: what its folder's name says."""

    step: int
    attempt: int
    folder: Path


@dataclass
class _Used:
    """What a run keeps, counted at `counted_ms` and followed since."""

    size: int
    files: int
    counted_ms: int


class Store:
    """Folders below `root`. Thread-safe: `_lock` guards index, digests and counts; a folder has one writer."""

    def __init__(self, root: Path) -> None:
        self.committed, self._staging = root / "store", root / "staging"
        self._lock = threading.Lock()
        self._index: dict[str, Path] = {}
        self._scanned: set[Path] = set()
        self._digests: dict[tuple[int, ...], str] = {}
        self._used: dict[str, _Used] = {}
        for folder in (self.committed, self._staging):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)

    # --- staging --------------------------------------------------------------------------------------

    def sweep(self, run: str = "") -> None:
        """Remove what dead attempts left in staging: of `run`, or of everybody (when no attempt lives)."""
        for folder in self._staging.iterdir():
            if not run or folder.name.startswith(f"{run}."):
                shutil.rmtree(folder, ignore_errors=True)

    def begin(self, run: str, attempt: int) -> Staging:
        """Make a staging folder; raises Unavailable (``unavailable.disk``) when the disk is nearly full, OSError."""
        self.require_room()
        folder = self._staging / f"{run}.{attempt}.{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        return Staging(folder)

    def require_room(self) -> None:
        """Refuse below 1 GiB or 5 % free, or 5 % of the inodes; raises Unavailable (``unavailable.disk``)."""
        disk = os.statvfs(self._staging)
        free = disk.f_bavail * disk.f_frsize
        few = free < max(ROOM_BYTES, disk.f_blocks * disk.f_frsize // ROOM_SHARE)
        if few or disk.f_favail < disk.f_files // ROOM_SHARE:
            raise Unavailable("the node's disk has too little room for a checkpoint", code="disk",
                              next_step="make room on the node's state disk; old checkpoints lie in broker/store",
                              details={"free_bytes": free})

    def allowance(self, run: str) -> int:
        """Return how many bytes the next save of `run` may have; raises Denied (``denied.budget``) when the run keeps
        as much as one run may."""
        disk = os.statvfs(self._staging)
        whole = disk.f_blocks * disk.f_frsize
        used = self._kept_by(run, again_ms=1 << 62)
        if used.size >= whole // RUN_SHARE or used.files >= RUN_FILES:
            used = self._kept_by(run, again_ms=COUNT_AGAIN_MS)  # somebody may have made room
        if used.size >= whole // RUN_SHARE or used.files >= RUN_FILES:
            raise over_budget("this run keeps as many checkpoints as one run may", used.size,
                              f"remove old ones below broker/store/{run} on the node")
        return min(whole // SAVE_SHARE, whole // RUN_SHARE - used.size)

    def _kept_by(self, run: str, again_ms: int) -> _Used:
        now = boottime_ms()
        with self._lock:
            found = self._used.get(run)
            if found is None or now - found.counted_ms >= again_ms:
                found = self._used[run] = _count(self.committed / run, now)
            return found

    # --- commit ---------------------------------------------------------------------------------------

    def place(self, run: str, step: int, attempt: int) -> Path:
        """Return the folder of a step of an attempt; raises Conflict (``conflict.step``) when it is taken."""
        folder = self.committed / run / f"{step}-{attempt}"
        if folder.exists():
            raise Conflict("this attempt has a checkpoint of this step already", code="step",
                           next_step="a committed step is never overwritten: save under a later step")
        return folder

    def commit(
        self, staging: Staging, place: Path, names: set[str], manifest: bytes, last: Callable[[], None],
        synced: Collection[str] = (),
    ) -> None:
        """Move `staging` to `place`, durably, with `manifest` in it.

        Args: `names` the proven files; `last` asked right before the rename, a refusal of it leaves all as it was;
        `synced` those of the files that are on the disk already.
        Raises Conflict (``conflict.step``), Untrusted (``untrusted.files``), what `last` raises, OSError.
        """
        if staging.names() != names:
            raise Untrusted("the staging folder holds other files than were created", code="files")
        for name in sorted(names - set(synced)):
            _sync_file(staging.folder / name)
        fd = os.open(staging.folder / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        with os.fdopen(fd, "wb") as out:
            out.write(manifest)
            out.flush()
            os.fsync(fd)
        sync_folder(staging.folder)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        sync_folder(self.committed)
        last()
        try:
            os.rename(staging.folder, place)  # a folder that is not empty is never replaced
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise Conflict("this attempt has a checkpoint of this step already", code="step") from None
            raise
        with self._lock:
            used = self._used.get(place.parent.name)
            if used is not None:
                more = _count(place.parent, 0, only=place.name)
                used.size, used.files = used.size + more.size, used.files + more.files
        sync_folder(place.parent)
        sync_folder(self._staging)

    def withdraw(self, place: Path) -> None:
        """Take back a step that could not be recorded: out of the store in one rename, then removed."""
        away = self._staging / f"withdrawn.{secrets.token_hex(8)}"
        os.rename(place, away)
        with self._lock:
            self._used.pop(place.parent.name, None)
        sync_folder(place.parent)
        shutil.rmtree(away, ignore_errors=True)

    # --- what is there --------------------------------------------------------------------------------

    def kept(self, run: str) -> list[Kept]:
        """Return the committed steps of a run, the highest step first, of one step the latest attempt."""
        try:
            names = os.listdir(self.committed / run)
        except OSError:
            return []
        found = [Kept(int(m[1]), int(m[2]), self.committed / run / m[0]) for n in names if (m := _STEP.fullmatch(n))]
        return sorted(found, key=lambda k: (k.step, k.attempt), reverse=True)

    def find(self, digest: str) -> Path:
        """Return the folder whose manifest claims that digest, of any run; raises NotFound (``not_found.version``)."""
        with self._lock:
            if not (self._index.get(digest, Path("/nowhere")) / MANIFEST).exists():
                self._scan()
            found = self._index.get(digest)
        if found is None or not (found / MANIFEST).exists():
            raise NotFound("this node does not hold that version", code="version",
                           next_step="run it on the node whose broker holds the checkpoint")
        return found

    def _scan(self) -> None:
        for run in self.committed.iterdir():
            for kept in self.kept(run.name):
                if kept.folder in self._scanned:
                    continue
                try:
                    self._index[read(read_manifest(kept.folder)).digest()] = kept.folder
                except (Refusal, OSError):
                    continue  # it may be repaired: looked at again next time
                self._scanned.add(kept.folder)

    def digest_of(self, fd: int) -> str:
        """Return ``sha256:`` over the whole file. One that was hashed before and whose inode says that nothing was
        written since is not read again; what rots below the file system, the seal of each chunk shows."""
        mark = _mark(fd)
        with self._lock:
            known = self._digests.get(mark)
        if known is None:
            known = _hash(fd)
            self._keep(mark, known)
        return known

    def remember(self, fd: int, digest: str) -> None:
        """Keep the digest of a file that was just hashed elsewhere, and that nobody can write."""
        self._keep(_mark(fd), digest)

    def _keep(self, mark: tuple[int, ...], digest: str) -> None:
        with self._lock:
            if len(self._digests) > 4096:
                self._digests.clear()
            self._digests[mark] = digest


def close_off(path: Path, wait_ms: int | None = None) -> int:
    """Return a read-only descriptor of a file that nobody can write any more: no writer is left, mode 0400.

    The kernel grants a read lease only while no descriptor and no shared mapping can write; the folder is closed to
    the guest, so none comes anew. Raises Conflict (``conflict.open_writer``) after `wait_ms`
    (`WRITER_MS` unless told), OSError.
    """
    fd = os.open(path, _READ)
    try:
        until_ms = boottime_ms() + (WRITER_MS if wait_ms is None else wait_ms)
        while not lease(fd):
            if boottime_ms() >= until_ms:
                raise Conflict(f"{path.name} is still open for writing", code="open_writer",
                               next_step="close every descriptor and mapping of the file before the commit")
            time.sleep(0.02)
        if os.fstat(fd).st_mode & 0o777 != 0o400:  # a change would make a digest that is known look stale
            os.fchmod(fd, 0o400)
    except BaseException:
        os.close(fd)
        raise
    return fd


def lease(fd: int) -> bool:
    """Return whether nobody can write the file now: the kernel grants a read lease, given back at once."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def open_kept(folder: Path, name: str, size: int) -> int:
    """Return a read-only descriptor of a committed file; raises Untrusted (``untrusted.files``) when it is not there
    in that size."""
    try:
        fd = os.open(folder / name, _READ | os.O_NONBLOCK)
    except OSError:
        raise Untrusted(f"{name} is missing in the store", code="files", next_step="load an older step") from None
    if os.fstat(fd).st_size != size:
        os.close(fd)
        raise Untrusted(f"{name} has another size than its manifest says", code="files",
                        next_step="load an older step")
    return fd


def read_manifest(folder: Path) -> bytes:
    """Return the bytes of a committed manifest, unverified; raises OSError."""
    with os.fdopen(os.open(folder / MANIFEST, _READ | os.O_NONBLOCK), "rb") as source:
        return source.read(MAX_BYTES + 1)


def over_budget(message: str, size: int, next_step: str) -> Denied:
    """Return the refusal of a save for which there is no budget; `size` in bytes is what it, or its run, takes."""
    return Denied(message, code="budget", next_step=next_step, details={"bytes": size})


def _count(folder: Path, now_ms: int, only: str = "") -> _Used:
    """Count the files of a run's steps (of the step `only`). Each is looked at once, without a manifest."""
    found = _Used(0, 0, now_ms)
    with suppress(OSError):
        for step in [only] if only else os.listdir(folder):
            with suppress(OSError), os.scandir(folder / step) as files:
                for file in files:
                    found.size += file.stat(follow_symlinks=False).st_size
                    found.files += 1
    return found


def _mark(fd: int) -> tuple[int, ...]:
    """Return what the inode says of its content; it changes with every write."""
    info = os.fstat(fd)
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _sync_file(path: Path) -> None:
    fd = os.open(path, _READ)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _hash(fd: int) -> str:
    found, at = hashlib.sha256(), 0
    while piece := os.pread(fd, _PIECE, at):
        found.update(piece)
        at += len(piece)
    return "sha256:" + found.hexdigest()
