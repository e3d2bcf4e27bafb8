"""Where AF_UNIX is open, no bind may hold a socket: a read-only bind does not stop connect().

Two looks. The host's own trees are walked once a boot, since that takes a second or more: only root can put
a socket there, and what it puts there later and listens on is found by the second look, at each start: the
kernel's table of bound sockets. `enter.py` walks the run's own folders each time, after they were mounted.
"""

import json
import os
import stat
from contextlib import suppress
from pathlib import Path

from interlock.errors import LayerMissing
from sandbox.profile import Profile

TABLE = Path("/proc/net/unix")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_clean: set[tuple[str, int, int]] = set()


def below(folder: str) -> str:
    """Return the path of a unix socket below `folder`, empty when there is none; links are not followed."""
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                    continue  # answered from the listing, without looking at each file
                elif stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    return entry.path
    return ""


def bound_below(folder: str, table: Path = TABLE) -> str:
    """Return the path of a socket below `folder` that some program of this host is bound to now, or empty."""
    with table.open(encoding="utf-8", errors="surrogateescape") as rows:
        paths = [fields[7].rstrip("\n") for fields in (row.split(" ", 7) for row in rows) if len(fields) == 8]
    return next((p for p in paths if p.startswith(folder.rstrip("/") + "/")), "")


def refuse(profile: Profile, kept: Path) -> None:
    """Refuse a profile with sockets whose host trees hold another; `kept` remembers the walk for this boot.

    Raises LayerMissing (``layer_missing.source``).
    """
    folders = [m.source for m in profile.mounts if m.kind == "ro" and m.source == m.target]
    for folder in (f for f in folders if profile.sockets and os.path.isdir(f)):
        found = bound_below(folder) or ("" if _known(folder, kept) else below(folder))
        if found:
            raise LayerMissing(
                f"the run was not started: {found} is a unix socket in a folder that every run sees", code="source",
                next_step="end the program that listens there and remove the socket",
            )
        _remember(folder, kept)


def _identity(folder: str) -> tuple[str, int, int]:
    """Return what changes when another file system or folder lies there."""
    info = os.stat(folder)
    return folder, info.st_dev, info.st_ino


def _known(folder: str, kept: Path) -> bool:
    if _identity(folder) not in _clean:
        _clean.update(_read(kept))
    return _identity(folder) in _clean


def _read(kept: Path) -> set[tuple[str, int, int]]:
    """Return what an earlier program of this boot found clean; nothing from a file that is not ours alone."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        fd = os.open(kept, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != 0 or info.st_mode & 0o022:
                return set()
            value = json.loads(file.read(1 << 20))
        if value["boot"] == _BOOT.read_text():
            return {(str(f), int(d), int(i)) for f, d, i in value["clean"]}
    return set()


def _remember(folder: str, kept: Path) -> None:
    """Note a clean folder; a note that cannot be kept costs the next program a walk."""
    if _identity(folder) in _clean and kept.exists():
        return
    _clean.add(_identity(folder))
    draft = kept.with_name(f".{kept.name}.{os.getpid()}")
    with suppress(OSError):
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump({"boot": _BOOT.read_text(), "clean": sorted(_clean)}, file)
        os.replace(draft, kept)
