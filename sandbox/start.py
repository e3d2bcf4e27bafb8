"""Start one run: profile → argv → filter → enter.py → bubblewrap → run init, blocked until GO.

Everything is checked before the caller gets a handle; a failure at any step tears down all before it,
raises LayerMissing that names the layer, and leaves nothing running. GO is not given here: the writing end
of the lease pipe is handed on to the supervisor, who alone may write it.

The effective profile is what the kernel says, read from the host's side (/proc/PID) and from run init's own
self-check, never what was asked for; its digest goes into the record of the launch.
"""

import json
import marshal
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interlock.canon import digest
from interlock.errors import LayerMissing
from sandbox import bwrap, layers, seccomp, sockets, uids
from sandbox.cgroup import Group
from sandbox.profile import SHM, TMP, WORK, Profile
from sandbox.work import Disk

START_S = 20.0
_OOM_SCORE = 800
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_END = {"exit", "signal", "why"}


@dataclass(frozen=True)
class StartSpec:
    """What one attempt needs. `group` was made by the supervisor; `deadline_page` is its page for this
    attempt; `disk` is mounted (`sandbox.work.mount`); `argv` runs inside, found by the PATH inside."""

    profile: Profile
    argv: tuple[str, ...]
    group: Group
    deadline_page: Path
    disk: Disk


class Report:
    """Lines that run init writes. Reading never blocks longer than asked."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next line, None after `timeout_s` or at the end of the report."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left < 0 or not select.select([self.fd], [], [], left)[0]:
                return None
            data = os.read(self.fd, 65_536)
            if not data or len(self._rest) > 1 << 20:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        value = json.loads(line)
        return value if isinstance(value, dict) else None

    def outcome(self, timeout_s: float) -> dict[str, Any] | None:
        """Return ``{"exit": n}``, ``{"signal": n}`` or ``{"why": …}``; None when there is none in time.

        A run that was killed reports nothing: its outcome comes from the supervisor.
        """
        end = time.monotonic() + timeout_s
        while True:
            line = self.next(max(0.0, end - time.monotonic()))
            if line is None or _END & set(line):
                return line


@dataclass
class Started:
    """A run whose init waits for GO. The caller owns the descriptors and `process`.

    `pipe_write_fd` is the lease pipe, to be handed to the supervisor; `keep_fd` ends the run when it is
    closed, so hold it as long as the run may live (it closes by itself when this program dies).
    """

    process: subprocess.Popen[bytes]
    pid: int
    init_pidfd: int
    pipe_write_fd: int
    keep_fd: int
    output_fd: int
    report: Report
    effective: dict[str, Any] = field(default_factory=dict)

    @property
    def effective_digest(self) -> str:
        """Return the digest of the effective profile."""
        return digest(self.effective)

    def release_pipe(self) -> None:
        """Close our writing end of the lease pipe, after the supervisor has its own."""
        if self.pipe_write_fd >= 0:
            os.close(self.pipe_write_fd)
            self.pipe_write_fd = -1

    def kill(self) -> None:
        """SIGKILL run init, which ends its namespace; works without the supervisor. No error when dead."""
        with suppress(OSError):
            signal.pidfd_send_signal(self.init_pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close our descriptors; a run that still lives ends by that."""
        self.release_pipe()
        for name in ("keep_fd", "init_pidfd", "output_fd"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)
        if self.report.fd >= 0:
            os.close(self.report.fd)
            self.report.fd = -1


def memory_file(name: str, content: bytes, keep: ExitStack) -> int:
    """Return a descriptor of a file in memory that holds `content`, at its start; `keep` closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    keep.callback(os.close, fd)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class _Pipes:
    """The pipes of one start: `ours` stay with the launcher, `theirs` are closed once the child has them."""

    def __init__(self, ours: ExitStack, theirs: ExitStack) -> None:
        self._ours, self._theirs = ours, theirs

    def make(self, *, we_write: bool = False) -> tuple[int, int]:
        """Return (our end, their end)."""
        read, write = os.pipe2(os.O_CLOEXEC)
        our, their = (write, read) if we_write else (read, write)
        self._ours.callback(os.close, our)
        self._theirs.callback(os.close, their)
        return our, their


def enter_spec(spec: StartSpec, argv: Sequence[str], pass_fds: Sequence[int]) -> dict[str, Any]:
    """Return what enter.py is told; pure."""
    profile = spec.profile
    rows = [
        {**m.as_json(), "system": m.source == m.target}
        for m in (*profile.mounts, *profile.sockets)
    ]
    return {
        "procs_files": spec.group.procs_files(), "uid": profile.uid, "files": profile.bounds.files,
        "disk_mb": profile.bounds.work_mb, "oom": _OOM_SCORE, "sources": rows, "sources_at": bwrap.SOURCES,
        "disk": str(spec.disk.path), "unix": bool(profile.sockets), "argv": list(argv),
        "pass_fds": sorted(pass_fds),
    }


def _init_spec(spec: StartSpec, pipe: int, keep: int, report: int, page: int) -> bytes:
    profile = spec.profile
    return marshal.dumps({
        "pipe": pipe, "keep": keep, "report": report, "page": page, "argv": list(spec.argv),
        "cpu_seconds": profile.bounds.cpu_seconds, "landlock": profile.shape.landlock,
        "writable": [WORK, TMP, SHM], "tcp": profile.shape.tcp,
    })


def interpreter() -> list[str]:
    """Return the words that start one of our stand-alone files."""
    return [os.path.realpath(sys.executable), "-I", "-S"]


def spawn_entered(spec: dict[str, Any], stdio: tuple[int, int], keep: ExitStack) -> subprocess.Popen[bytes]:
    """Start enter.py with `spec`; `stdio` are its output and its error descriptor."""
    fd = memory_file("enter", marshal.dumps(spec), keep)
    file = str(Path(__file__).resolve().with_name("enter.py"))
    return subprocess.Popen(
        [*interpreter(), file, str(fd)], stdin=subprocess.DEVNULL, stdout=stdio[0], stderr=stdio[1],
        pass_fds=(*spec["pass_fds"], fd), close_fds=True, cwd="/", env={}, restore_signals=True,
    )


def _missing(layer: str, message: str) -> LayerMissing:
    return LayerMissing(
        f"the run was not started: {message}", code=layer, next_step="ask `interlock doctor` what this host lacks",
    )


def _why_not(error_fd: int) -> LayerMissing:
    """Turn what enter.py or bubblewrap said before it died into the refusal that names the layer."""
    os.set_blocking(error_fd, False)
    try:
        said = os.read(error_fd, 4096).decode(errors="replace").strip()
    except BlockingIOError:
        said = ""
    for line in said.splitlines():
        with suppress(ValueError):
            value = json.loads(line)
            return _missing(str(value["layer"]), str(value["message"]))
    layer = "user_namespaces" if "namespace" in said or "uid map" in said else "bwrap"
    return _missing(layer, said.splitlines()[-1][:300] if said else "no answer from the sandbox")


def _child_pid(info_fd: int) -> int:
    """Return the host's pid of run init, as bubblewrap wrote it before it let run init go."""
    return int(json.loads(os.pread(info_fd, 4096, 0))["child-pid"])


def _status(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    return dict(row.split(":\t", 1) for row in text.splitlines() if ":\t" in row)


def violations(spec: StartSpec, pid: int, status: dict[str, str], check: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (layer, message) for each way in which the kernel's facts differ from the profile.

    `status` is the host's view of run init, `check` its own report.
    """
    profile, found = spec.profile, []
    if status.get("Uid", "").split() != [str(profile.uid)] * 4:
        found.append(("uid", "run init does not have the uid of the run"))
    if status.get("NoNewPrivs") != "1" or status.get("Seccomp") != "2":
        found.append(("seccomp", "no filter of system calls is in force"))
    if any(int(status.get(c, "1"), 16) for c in _CAPABILITIES):
        found.append(("capabilities", "run init holds capabilities"))
    inner = status.get("NSpid", "").split()
    if check["pid"] != 1 or inner[-1:] != ["1"] or len(inner) < 2:
        found.append(("pid_namespace", "run init is not pid 1 of its own namespace"))
    for name in _NAMESPACES:
        if check["namespaces"].get(name) in (None, os.readlink(f"/proc/self/ns/{name}")):
            found.append((f"{name}_namespace", f"the {name} namespace is the host's"))
    if check["extra_fds"]:
        found.append(("descriptors", f"descriptors {check['extra_fds']} are open inside"))
    if not check["root_read_only"]:
        found.append(("mounts", "the root inside can be written"))
    if check["landlock_abi"] < profile.shape.landlock:
        found.append(("landlock", f"Landlock ABI {check['landlock_abi']} inside"))
    for path in spec.group.procs_files():
        if str(pid) not in Path(path).read_text().split():
            found.append(("cgroup", f"run init is not in {path}"))
    return found


def _effective(spec: StartSpec, status: dict[str, str], check: dict[str, Any]) -> dict[str, Any]:
    return {
        "profile": spec.profile.digest(), "uid": spec.profile.uid, "no_new_privs": status["NoNewPrivs"],
        "seccomp": status["Seccomp"], "capabilities": [status.get(c, "") for c in _CAPABILITIES],
        "namespaces": sorted(check["namespaces"]), "mounts": check["mounts"], "files": check["files"],
        "landlock_abi": check["landlock_abi"], "filter": seccomp_digest(spec.profile),
        "bounds": spec.profile.bounds.as_json(),
    }


def seccomp_digest(profile: Profile) -> str:
    """Return the digest of the filter of `profile` on this machine."""
    return digest({"program": seccomp.program(profile).hex()})


def _refuse_before(spec: StartSpec) -> None:
    layers.require(spec.profile)
    if spec.profile.uid in uids.in_use():
        raise _missing("uid", f"uid {spec.profile.uid} is in use")
    sockets.refuse(spec.profile, spec.disk.folder.parent.parent / "no-sockets.json")
    page = os.stat(spec.deadline_page)
    if page.st_size != 4096 or not stat.S_ISREG(page.st_mode):
        raise _missing("deadline_page", "the deadline page is not 4096 bytes")


def _judge(started: Started, spec: StartSpec, check: dict[str, Any]) -> None:
    """Compare run init with its profile; raises LayerMissing that names the first layer that differs."""
    status = _status(started.pid)
    found = violations(spec, started.pid, status, check)
    if found:
        layer, message = found[0]
        raise _missing(layer, message)
    started.effective = _effective(spec, status, check)


def _tear_down(process: subprocess.Popen[bytes], started: Started | None) -> None:
    process.kill()
    if started is not None:
        started.kill()
        select.select([started.init_pidfd], [], [], 5.0)  # readable once it is dead
    process.wait()


def _launch(spec: StartSpec) -> Started:
    with ExitStack() as ours, ExitStack() as theirs:
        pipes = _Pipes(ours, theirs)
        lease_w, lease_r = pipes.make(we_write=True)
        keep_w, keep_r = pipes.make(we_write=True)
        output_r, output_w = pipes.make()
        error_r, error_w = pipes.make()
        report_r, report_w = pipes.make()
        # A file, not a pipe: bubblewrap would die of a closed pipe half-way and leave its inner process behind.
        info = memory_file("info", b"", ours)
        page = os.open(spec.deadline_page, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        theirs.callback(os.close, page)
        filter_fd = memory_file("filter", seccomp.program(spec.profile), theirs)
        init_fd = memory_file("init", _init_spec(spec, lease_r, keep_r, report_w, page), theirs)
        argv = bwrap.argv(spec.profile, bwrap.Descriptors(filter_fd, info, init_fd), layers.find_bwrap())
        told = enter_spec(spec, argv, [lease_r, keep_r, report_w, page, filter_fd, init_fd, info])
        process = spawn_entered(told, (output_w, error_w), theirs)
        theirs.close()
        started: Started | None = None
        report = Report(report_r)
        try:
            line = report.next(START_S)
            if line is None or "self_check" not in line:
                process.kill()
                process.wait()
                raise _why_not(error_r)
            pid = _child_pid(info)
            started = Started(process, pid, os.pidfd_open(pid), lease_w, keep_w, output_r, report)
            ours.callback(os.close, started.init_pidfd)
            _judge(started, spec, line["self_check"])
        except (LayerMissing, OSError, ValueError, KeyError) as error:
            _tear_down(process, started)
            raise error if isinstance(error, LayerMissing) else _missing("init", str(error)) from None
        ours.pop_all()
        os.close(error_r)
        os.close(info)
        return started


def start(spec: StartSpec) -> Started:
    """Start one attempt; its init waits for GO on the lease pipe. Threads may call this.

    Raises LayerMissing whose code names the layer (``layer_missing.bwrap``, ``.cgroup``, ``.uid``,
    ``.source``, …); then nothing runs, and group and disk are the caller's to remove.
    """
    _refuse_before(spec)
    return _launch(spec)
