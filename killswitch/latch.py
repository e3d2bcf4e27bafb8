"""The operator's file latch: a file `STOP` or `STOP-<run>` in `STATE/supervisor/latch/` is a stop.

Presence is the signal; content is never read. Its id is H(node, device, inode, ctime), so one file is one
stop: looked at each second it changes nothing, and once a resume cleared that id it stays without effect
although the file lies there; a resume renames it (G3). To stop again, make or touch a new file.
"""

import ctypes
import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from interlock.durable import sync_folder
from interlock.order import Scope, ScopeKind

_NAME = re.compile(r"^STOP(?:-([A-Za-z0-9_]{1,64}))?$")
_IN_CREATE, _IN_MOVED_TO, _IN_ATTRIB = 0x100, 0x80, 0x4
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class LatchFile:
    """One latch file: where it lies, the id of the stop that it is, and what it covers."""

    path: Path
    id: str
    scope: Scope


def look(folder: Path, node: str) -> list[LatchFile]:
    """Return the latch files of `folder`; a name like ``STOP-…`` that no run can have stops the node."""
    found = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    for name in names:
        if not name.startswith("STOP"):
            continue
        with suppress(FileNotFoundError):
            found.append(_latch_file(folder / name, node))
    return found


def _latch_file(path: Path, node: str) -> LatchFile:
    info = path.lstat()
    seed = f"{node}\n{info.st_dev}\n{info.st_ino}\n{info.st_ctime_ns}"
    id_ = "latch_" + hashlib.sha256(seed.encode()).hexdigest()[:32]
    match = _NAME.match(path.name)
    run = match.group(1) if match else None
    return LatchFile(path, id_, Scope(ScopeKind.RUN, run) if run else Scope(ScopeKind.NODE, node))


def retire(folder: Path, node: str, cleared: frozenset[str]) -> None:
    """Rename the latch files whose stops were resumed; best effort, their ids stay cleared anyway."""
    for file in look(folder, node):
        if file.id in cleared:
            with suppress(OSError):
                os.rename(file.path, folder / f"cleared-{file.id}")


def drop(folder: Path, run: str | None) -> Path:
    """Make a latch file, durably; used where the supervisor does not answer. Raises OSError."""
    path = folder / (f"STOP-{run}" if run else "STOP")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.utime(fd)  # a file from earlier becomes a new stop: its ctime moves
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(folder)
    return path


def watch(folder: Path) -> int | None:
    """Return an inotify descriptor for new latch files, None where there is none (the look each second stays)."""
    fd = int(_LIBC.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
    if fd < 0:
        return None
    mask = _IN_CREATE | _IN_MOVED_TO | _IN_ATTRIB
    if _LIBC.inotify_add_watch(fd, os.fsencode(folder), mask) < 0:
        os.close(fd)
        return None
    return fd
