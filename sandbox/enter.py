"""From root into the run's uid, then bubblewrap. Stand-alone: ``python -I -S enter.py SPEC_FD`` as root.

Order, each step needs the one before: join the control groups (the process is killable from then on) →
limits → own mount namespace → open and check every source, bind it below the sources folder → drop to the
run's uid → close every descriptor that was not named → bubblewrap. bubblewrap never runs as root: with
host uid 0 the owner check of sysctls passes whatever capabilities were dropped.

The spec is in marshal form: it comes from the launcher, the same interpreter, through a file in memory, and
costs no import. A failure prints one JSON line ``{"layer": NAME, "message": TEXT}`` on stderr and exits 70;
nothing ran.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import stat
import struct
import sys

TYPE_CHECKING = False  # `typing` itself would cost a tenth of this program
if TYPE_CHECKING:
    from typing import Any, NoReturn

_NEWNS = 0x00020000
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_DETACH, _NOFOLLOW = 2, 8
_OPENAT2, _NO_MAGIC, _NO_SYMLINKS = 437, 2, 4
_NO_NEW_PRIVS = 38
_MAX_ENTRIES = 200_000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _LayerError(Exception):
    def __init__(self, layer: str, message: str) -> None:
        super().__init__(message)
        self.layer = layer


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    args = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _checked(_libc.mount(*args), f"mount {target}")


def _join(procs_files: list[str]) -> None:
    for path in procs_files:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.write(fd, str(os.getpid()).encode())
        os.close(fd)


def _limit(files: int, disk_mb: int, oom: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    size = disk_mb << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, str(oom).encode())
    os.close(fd)


def _open(path: str) -> int:
    """Open one source without following any symbolic link, so that a swap after the check is no use."""
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, _NO_SYMLINKS | _NO_MAGIC)
    number = ctypes.c_long(_OPENAT2)
    args = (ctypes.c_int(-100), path.encode(), how, ctypes.c_size_t(len(how)))
    return _checked(int(_libc.syscall(number, *args)), f"open {path}")


def _check(path: str, found: os.stat_result, kind: str) -> None:
    mode = found.st_mode
    if kind == "socket":
        if not stat.S_ISSOCK(mode):
            raise _LayerError("source", f"{path} is no socket")
    elif not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise _LayerError("source", f"{path} is neither a folder nor a file")
    elif not mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH) and kind == "ro":
        raise _LayerError("source", f"{path} cannot be read by the uid of a run")


def _holds_socket(folder: str) -> str:
    """Return the path of a unix socket below `folder`, empty when there is none."""
    seen = 0
    for place, folders, names in os.walk(folder):
        seen += len(names) + len(folders)
        if seen > _MAX_ENTRIES:
            raise _LayerError("source", f"{folder} has too many entries to look for sockets in it")
        for name in names:
            if stat.S_ISSOCK(os.lstat(f"{place}/{name}").st_mode):
                return f"{place}/{name}"
    return ""


def _bind(row: dict[str, Any], fd: int, target: str, unix: bool) -> None:
    found = os.fstat(fd)
    _check(row["source"], found, row["kind"])
    if stat.S_ISDIR(found.st_mode):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o444))
    _mount(f"/proc/self/fd/{fd}", target, "", _BIND)
    # Looked at after the mount: what is seen here is what the run will see.
    if unix and row["kind"] != "socket" and not row["system"] and _holds_socket(target):
        raise _LayerError("source", f"{row['source']} holds a unix socket that the profile does not list")


def _text(content: str, target: str) -> None:
    with open(target, "w", encoding="utf-8") as file:
        file.write(content)
    os.chmod(target, 0o444)


def _forget(runs: str, own: str) -> None:
    """Let go of the disks of other runs: bubblewrap's outer process keeps this namespace for the life of the
    run and would hold their memory."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split()[4] for line in file]
    for point in points:
        if point.startswith(runs + "/") and point != own:
            _libc.umount2(os.fsencode(point), _DETACH | _NOFOLLOW)


def _sources(spec: dict[str, Any]) -> None:
    folder, rows = spec["sources_at"], spec["sources"]
    _checked(_libc.unshare(_NEWNS), "unshare mounts")
    _mount("none", "/", "", _REC | _PRIVATE)
    disk = _open(spec["disk"])
    _forget(os.path.dirname(os.path.dirname(spec["disk"])), spec["disk"])
    # All are opened before the next mount covers the place where some of them lie.
    opened = {i: _open(row["source"]) for i, row in enumerate(rows) if row["kind"] in ("ro", "rw", "socket")}
    _mount("tmpfs", os.path.dirname(folder), "tmpfs", _NOSUID | _NODEV | _NOEXEC, "mode=0755,size=1m")
    os.mkdir(folder, 0o755)
    os.mkdir(f"{folder}/disk", 0o755)
    _mount(f"/proc/self/fd/{disk}", f"{folder}/disk", "", _BIND)
    os.close(disk)
    for i, row in enumerate(rows):
        if i in opened:
            _bind(row, opened[i], f"{folder}/{i}", bool(spec["unix"]))
            os.close(opened[i])
        elif row["kind"] == "text":
            _text(row["source"], f"{folder}/{i}")


def _drop(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid, uid, uid) or uid < 60_000:
        raise _LayerError("uid", "the uid of the run is not in force")
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _close_all_but(kept: list[int]) -> None:
    edge = 3
    for fd in sorted(kept):
        os.closerange(edge, fd)
        os.set_inheritable(fd, True)
        edge = fd + 1
    os.closerange(edge, 1 << 20)


def _fail(layer: str, message: str) -> NoReturn:
    import json  # a third of the start of this program; only a failure pays it

    os.write(2, json.dumps({"layer": layer, "message": message}).encode() + b"\n")
    os._exit(70)


def main() -> NoReturn:
    """Do all steps, then exec; see the head of the file."""
    layer = "spec"
    try:
        with os.fdopen(int(sys.argv[1]), "rb") as file:
            spec = marshal.loads(file.read())  # noqa: S302
        layer = "cgroup"
        _join(spec["procs_files"])
        layer = "limits"
        _limit(spec["files"], spec["disk_mb"], spec["oom"])
        layer = "source"
        _sources(spec)
        os.chdir("/")
        layer = "uid"
        _drop(spec["uid"])
        layer = "bwrap"
        _close_all_but(spec["pass_fds"])
        os.execve(spec["argv"][0], spec["argv"], {"PATH": "/usr/bin:/bin"})  # noqa: S606
    except _LayerError as error:
        _fail(error.layer, str(error))
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        _fail(layer, str(error))


if __name__ == "__main__":
    main()
