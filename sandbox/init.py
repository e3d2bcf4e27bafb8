"""Run init: pid 1 of a run. Stand-alone, standard library only: ``python -I -S /opt/…/init.py SPEC_FD``.

Rules that a reviewer ticks off:
1. PR_SET_DUMPABLE 0 comes first: else a workload of the same uid rewrites this process by /proc/1/mem.
2. The self-check is reported before anything waits; the launcher judges it, from the host's side too.
3. No code of the workload runs before the byte ``G`` came through the lease pipe (the supervisor's).
4. The end comes by itself: end of file on the lease pipe (supervisor gone), end of file on the keep pipe
   (launcher gone), the deadline in the page (looked at every 100 ms at the latest, CLOCK_BOOTTIME, boot id
   compared), or the end of the main child. pid 1 ends → the kernel ends everything in the namespace.
5. It holds no secret, reads nothing but pipe and page, and ignores every signal that it may.

Page: 8 bytes ``ILKDEAD1``, u64 little-endian deadline in ns of CLOCK_BOOTTIME, 16 bytes boot id. A page
that is anything else counts as a deadline that has passed.
Report lines (JSON): ``{"self_check": {…}}``, ``{"go": true}``, then one of ``{"exit": N}``,
``{"signal": N}``, ``{"why": "pipe"|"launcher"|"deadline"|"start"}``.
"""

from __future__ import annotations

import ctypes
import marshal
import mmap
import os
import resource
import select
import struct
import sys
import time

# The interpreter's own names for signals: the library around them builds enumerations, and that, like `typing`,
# would cost a fifth of the start, which every run pays. A type checker sees the ordinary ones.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, NoReturn
else:
    import _signal as signal

_DUMPABLE, _GET_DUMPABLE = 4, 3
_POLL_MS = 100
_MAGIC = b"ILKDEAD1"
_STATUS = ("Uid", "NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


class _Deadline:
    """The one absolute deadline of this run, read from the shared page."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            self._boot = bytes.fromhex(file.read().strip().replace("-", ""))
        os.close(fd)

    def left_ns(self) -> int:
        """Return the nanoseconds that are left; 0 or less when the run must end."""
        magic, deadline, boot = struct.unpack_from("<8sQ16s", self._page)
        again: int = struct.unpack_from("<Q", self._page, 8)[0]
        if magic != _MAGIC or boot != self._boot:
            return 0
        if again != deadline:  # caught in the middle of a write: the earlier one counts
            deadline = min(again, deadline)
        return int(deadline) - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _text(word: str) -> str:
    plain = all(" " <= c <= "~" and c not in '"\\' for c in word)
    units = word.encode("utf-16-be", "surrogatepass").hex()
    return f'"{word}"' if plain else '"' + "".join(f"\\u{units[i:i + 4]}" for i in range(0, len(units), 4)) + '"'


def to_json(value: Any) -> str:
    """Return JSON of texts, whole numbers, truths, lists and objects. The library's encoder brings regular
    expressions with it, which alone took a quarter of the start."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return "[" + ",".join(to_json(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_text(k)}:{to_json(v)}" for k, v in value.items()) + "}"
    return _text(value)


def _say(fd: int, line: dict[str, Any]) -> None:
    try:
        os.write(fd, to_json(line).encode() + b"\n")
    except OSError:  # nobody listens any more; the pipe and the page still end this run
        return


def _harden() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_DUMPABLE, 0, 0, 0, 0) != 0 or libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0) != 0:
        os._exit(71)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)


def _open_descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:  # the descriptor of the listing itself
            continue
        found.append(int(name))
    return sorted(found)


def _mounts() -> list[str]:
    rows = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="backslashreplace") as file:
        for line in file:
            fields = line.split()
            kind = fields[fields.index("-") + 1]
            rows.append(f"{fields[4]} {kind} {fields[5].split(',')[0]}")
    return sorted(rows)


def self_check(expected: list[int], landlock: dict[str, Any]) -> dict[str, Any]:
    """Return what the kernel says about this process; `extra_fds` are descriptors nobody named."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        rows = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {
        "pid": os.getpid(),
        **{name.lower(): rows.get(name, "").strip() for name in _STATUS},
        "namespaces": {n: os.readlink(f"/proc/self/ns/{n}") for n in _NAMESPACES},
        "extra_fds": [fd for fd in _open_descriptors() if fd > 2 and fd not in expected],
        "mounts": _mounts(),
        "root_read_only": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
        "landlock_abi": landlock["abi"](),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    }


def _ears(pipe: int, keep: int) -> select.poll:
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    poll.register(keep, select.POLLHUP)
    return poll


def _load(path: str) -> dict[str, Any]:
    """Return the names of a stand-alone file beside this one: with -I and -S nothing can be imported from here,
    and the library's own ways cost a tenth of the start."""
    names: dict[str, Any] = {"__name__": "landlock"}
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec"), names)  # noqa: S102
    return names


def _wait_for_go(pipe: int, keep: int, deadline: _Deadline) -> str:
    """Return "" after GO, else why the run must end."""
    poll = _ears(pipe, keep)
    while deadline.left_ns() > 0:
        heard = [fd for fd, _ in poll.poll(_POLL_MS)]
        if keep in heard:
            return "launcher"
        if pipe in heard:
            byte = os.read(pipe, 1)
            return "" if byte == b"G" else "pipe"
    return "deadline"


def _become_workload(spec: dict[str, Any], landlock: dict[str, Any]) -> NoReturn:
    try:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (spec["cpu_seconds"], spec["cpu_seconds"]))
        os.dup2(1, 2)
        os.closerange(3, 1 << 16)
        os.umask(0o022)
        landlock["restrict"](spec["writable"], spec["landlock"], spec["tcp"])
    except OSError as error:
        os.write(2, f"interlock: the run cannot be confined: {error}\n".encode())
        os._exit(126)
    try:
        os.execvpe(spec["argv"][0], spec["argv"], os.environ)  # noqa: S606
    except OSError as error:
        os.write(2, f"interlock: {spec['argv'][0]}: {error.strerror}\n".encode())
        os._exit(127)


def _reap(child: int) -> dict[str, Any] | None:
    """Collect every dead child; return the outcome when the main one is among them."""
    outcome = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return outcome or {"why": "start"}
        if pid == 0:
            return outcome
        if pid == child:
            signalled = os.WIFSIGNALED(status)
            outcome = {"signal": os.WTERMSIG(status)} if signalled else {"exit": os.WEXITSTATUS(status)}


def _watch(child: int, pipe: int, keep: int, deadline: _Deadline) -> dict[str, Any]:
    poll = _ears(pipe, keep)
    bell, ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll.register(bell, select.POLLIN)
    while True:
        outcome = _reap(child)
        if outcome is not None:
            return outcome
        if deadline.left_ns() <= 0:
            return {"why": "deadline"}
        for fd, _ in poll.poll(_POLL_MS):
            if fd == bell:
                os.read(bell, 4096)
            elif fd == keep:
                return {"why": "launcher"}
            elif os.read(pipe, 64) == b"":
                return {"why": "pipe"}


def main() -> NoReturn:
    """Run one command under the lease; see the head of the file."""
    _harden()
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        spec = marshal.loads(file.read())  # noqa: S302 - from the launcher alone, and it costs no import
    landlock = _load(os.path.join(os.path.dirname(os.path.abspath(__file__)), "landlock.py"))
    pipe, keep, report = spec["pipe"], spec["keep"], spec["report"]
    check = self_check([pipe, keep, report, spec["page"]], landlock)
    deadline = _Deadline(spec["page"])
    _say(report, {"self_check": check})
    why = _wait_for_go(pipe, keep, deadline)
    if why:
        _say(report, {"why": why})
        os._exit(72)
    child = os.fork()
    if child == 0:
        _become_workload(spec, landlock)
    _say(report, {"go": True})
    outcome = _watch(child, pipe, keep, deadline)
    _say(report, outcome)
    os._exit(outcome.get("exit", 128 + outcome["signal"] if "signal" in outcome else 72))


if __name__ == "__main__":
    main()
