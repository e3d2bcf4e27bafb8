"""Give up root and still reach what lies below a closed folder. Stand-alone, standard library only:

    python -I -S drop.py --uid N --gid N --reach PATH… [--write PATH…] -- /abs/program ARG…

The control plane and the broker run under users of their own, while the virtual environment, the
interpreter or the state may lie below a folder that only root may enter. In a mount namespace of its own
the topmost folder that the user cannot pass is covered by a small empty tmpfs, and exactly the named paths
are bound back in: `--reach` read-only, `--write` as they are. Nothing on the host changes, no mode is
widened. What lies elsewhere is not hidden: this is reachability, not a sandbox.

Inherited descriptors and the environment go on to the program, the folder becomes ``/``. A failure prints
``{"error": {code, message, next_step, details}}`` on stderr and exits 70; nothing was started.
"""

import ctypes
import json
import os
import stat
import struct
import sys
from typing import NoReturn

_NEWNS, _BIND, _REC, _SLAVE, _REMOUNT, _RDONLY = 0x00020000, 4096, 16384, 1 << 19, 32, 1
_NOSUID, _NODEV = 2, 4
_OPENAT2, _NO_MAGIC, _NO_SYMLINKS = 437, 2, 4
_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _DropError(Exception):
    pass


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise _DropError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    args = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _checked(_libc.mount(*args), f"mount {target}")


def passes(found: os.stat_result, uid: int, gid: int) -> bool:
    """Return whether the user may pass through a folder, by its mode alone."""
    if found.st_uid == uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if found.st_gid == gid:
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH)


def barrier(path: str, uid: int, gid: int) -> str:
    """Return the topmost folder above `path` that the user cannot pass, empty when there is none."""
    parts = path.split("/")
    for end in range(1, len(parts)):
        folder = "/".join(parts[:end]) or "/"
        if not passes(os.stat(folder), uid, gid):
            return folder
    return ""


def _open(path: str) -> int:
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, _NO_SYMLINKS | _NO_MAGIC)
    args = (ctypes.c_int(-100), os.fsencode(path), how, ctypes.c_size_t(len(how)))
    return _checked(int(_libc.syscall(ctypes.c_long(_OPENAT2), *args)), f"open {path}")


def _bind(fd: int, path: str, writable: bool) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.makedirs(path, mode=0o755, exist_ok=True)
    elif not os.path.exists(path):
        os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o444))
    _mount(f"/proc/self/fd/{fd}", path, "", _BIND | _REC)
    if not writable:
        _mount("none", path, "", _BIND | _REMOUNT | _RDONLY | _NOSUID)


def make_reachable(reach: list[str], write: list[str], uid: int, gid: int) -> list[str]:
    """Cover each barrier and bind the named paths back in; needs root. Returns the covered folders."""
    _checked(_libc.unshare(_NEWNS), "unshare mounts")
    _mount("none", "/", "", _REC | _SLAVE)
    os.umask(0o022)  # the folders made here lie in the covers alone, and the user has to pass them
    wanted = {**dict.fromkeys(reach, False), **dict.fromkeys(write, True)}
    rows = [(path, barrier(path, uid, gid), writable) for path, writable in sorted(wanted.items())]
    # All are opened before the first cover: after it they could not be found any more.
    opened = {path: _open(path) for path, wall, _ in rows if wall}
    covered = sorted({wall for _, wall, _ in rows if wall})
    if "/" in covered:
        raise _DropError("the root folder itself cannot be passed")
    for wall in covered:
        _mount("tmpfs", wall, "tmpfs", _NOSUID | _NODEV, "mode=0755,size=1m")
    for path, wall, writable in rows:
        if wall:
            found = os.fstat(opened[path])
            if stat.S_ISDIR(found.st_mode) and not passes(found, uid, gid):
                raise _DropError(f"{path} is closed to uid {uid}")
            _bind(opened[path], path, writable)
            os.close(opened[path])
    return covered


def give_up(uid: int, gid: int) -> None:
    """Become the user for good: no group, no capability, no way back by a setuid program."""
    if uid == 0 or gid == 0:
        raise _DropError("the user to become is root")
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid) or os.getgroups():
        raise _DropError("the user is not in force")


def parse(words: list[str]) -> tuple[int, int, list[str], list[str], list[str]]:
    """Return (uid, gid, reach, write, argv) of the command line; raises ValueError."""
    lists: dict[str, list[str]] = {"--uid": [], "--gid": [], "--reach": [], "--write": []}
    if "--" not in words:
        raise ValueError("no -- before the program")
    split = words.index("--")
    current = ""
    for word in words[:split]:
        if word in lists:
            current = word
        elif current:
            lists[current].append(word)
        else:
            raise ValueError(f"unexpected word {word!r}")
    argv = words[split + 1 :]
    paths = lists["--reach"] + lists["--write"]
    if not argv or not all(p.startswith("/") and os.path.normpath(p) == p for p in [argv[0], *paths]):
        raise ValueError("the program and every path are absolute and plain")
    if len(lists["--uid"]) != 1 or len(lists["--gid"]) != 1:
        raise ValueError("one --uid and one --gid")
    return int(lists["--uid"][0]), int(lists["--gid"][0]), lists["--reach"], lists["--write"], argv


def main() -> NoReturn:
    """Do it; see the head of the file."""
    try:
        uid, gid, reach, write, argv = parse(sys.argv[1:])
        make_reachable(reach, write, uid, gid)
        os.chdir("/")
        give_up(uid, gid)
        os.execve(argv[0], argv, dict(os.environ))  # noqa: S606
    except (_DropError, OSError, ValueError) as error:
        body = {
            "code": "layer_missing.drop", "message": f"the program was not started: {error}",
            "next_step": "start as root; name every path that the program needs; open code with: chmod -R go+rX PATH",
            "details": {},
        }
        os.write(2, json.dumps({"error": body}).encode() + b"\n")
        os._exit(70)


if __name__ == "__main__":
    main()
