"""The three programs of one machine: where they lie, their pid files, how one is started and ended.

A pid file holds pid and start time, so a number that the kernel gave to somebody else is never signalled;
the signal itself goes through a pidfd.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interlock.errors import Refusal, Unavailable, Usage, from_json
from interlock.places import SOCKET_BYTES, default_runtime, default_state, too_long

CONTROL, SUPERVISOR, NODE = "control_plane", "killswitch", "runners"
# The supervisor ends its runs, the node reports how they ended, the control plane hears it: in this order.
ENDING = (SUPERVISOR, NODE, CONTROL)
# Children of this very process, to be reaped by `end`; a program outlives the command that started it.
_children: dict[int, "subprocess.Popen[bytes]"] = {}


@dataclass(frozen=True)
class Places:
    """STATE and RUNTIME of one site (docs/decisions/0001-seams.md §1)."""

    state: Path
    runtime: Path

    @classmethod
    def of(cls, state: Path | None, runtime: Path | None) -> "Places":
        """Return the places from the options or their defaults; raises Usage (``usage.path``)."""
        chosen = (state or default_state()).absolute()
        found = cls(chosen, (runtime or default_runtime(chosen)).absolute())
        if too_long(found.socket):
            raise Usage(f"{found.socket} is longer than {SOCKET_BYTES} bytes", code="path",
                        next_step="choose a shorter --state or --runtime")
        return found

    @property
    def socket(self) -> Path:
        """Return the supervisor's socket."""
        return self.runtime / "supervisor.sock"

    @property
    def site_file(self) -> Path:
        """Return the file with site name, ports and node."""
        return self.state / "site.json"

    def pid_file(self, name: str) -> Path:
        """Return the pid file of a program."""
        return self.runtime / f"{name}.pid"

    def log(self, name: str) -> Path:
        """Return the log of a program."""
        return self.state / "logs" / f"{name}.log"

    def site(self) -> dict[str, Any]:
        """Return site.json, empty when there is none yet."""
        try:
            found = json.loads(self.site_file.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def start_time(pid: int) -> int | None:
    """Return when `pid` started, in clock ticks since boot (field 22 of proc/PID/stat); None when it is gone."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if rest[0] == "Z" else int(rest[19])


@dataclass(frozen=True)
class Program:
    """A program that was started. `facts` is what its ready line said, and what `down` needs."""

    name: str
    pid: int
    start: int
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def lives(self) -> bool:
        """Return whether this very process still runs."""
        return start_time(self.pid) == self.start

    def write(self, places: Places) -> None:
        """Store the pid file; the rename makes it whole or absent."""
        target = places.pid_file(self.name)
        fresh = target.with_suffix(".new")
        fresh.write_text(json.dumps({"pid": self.pid, "start": self.start, "facts": self.facts}))
        fresh.replace(target)


def recorded(places: Places, name: str) -> Program | None:
    """Return what the pid file says, dead or alive; None when there is none or it cannot be read."""
    try:
        found = json.loads(places.pid_file(name).read_text())
        return Program(name, int(found["pid"]), int(found["start"]), dict(found.get("facts") or {}))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def running(places: Places, name: str) -> Program | None:
    """Return the program when its pid file names a living process with the same start time."""
    found = recorded(places, name)
    return found if found and found.lives else None


def words_of(program: Program) -> list[str]:
    """Return the command line of a running program, nothing when it has just ended."""
    try:
        return Path(f"/proc/{program.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def clean_environment() -> dict[str, str]:
    """Return the environment of a program: nothing of the caller's but PATH."""
    return {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "LANG": "C.UTF-8", "HOME": "/"}


def launch(places: Places, name: str, argv: Sequence[str], *, wait_s: float = 40.0) -> Program:
    """Start a program in a session of its own and return when its ready line came.

    Raises the refusal that it printed, or Unavailable (``unavailable.start``) when it ended or stayed silent.
    """
    places.log(name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = os.open(places.log(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        offset = os.fstat(log).st_size
        process = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                                   env=clean_environment(), start_new_session=True)
    finally:
        os.close(log)
    facts = _ready(process, places.log(name), offset, wait_s, name)
    pid = int(facts.get("pid", process.pid))
    _children[process.pid] = process
    started = Program(name, pid, start_time(pid) or 0, facts)
    started.write(places)
    return started


def _ready(process: subprocess.Popen[bytes], log: Path, offset: int, wait_s: float, name: str) -> dict[str, Any]:
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        ended = process.poll() is not None
        for value in _objects(log, offset):
            if value.get("ready") == name:
                return value
            if ended and isinstance(value.get("error"), dict):
                raise from_json(value["error"])
        if ended:
            raise Unavailable(f"{name} ended with status {process.returncode} before it was ready", code="start",
                              next_step=f"read {log}", details={"program": name, "tail": _tail(log, offset)})
        time.sleep(0.05)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    process.kill()
    raise Unavailable(f"{name} was not ready after {wait_s:.0f} s and was ended", code="start",
                      next_step=f"read {log}", details={"program": name, "tail": _tail(log, offset)})


def _objects(log: Path, offset: int) -> list[dict[str, Any]]:
    found = []
    with log.open("rb") as source:
        source.seek(offset)
        for line in source.read(1 << 20).splitlines():
            with suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    found.append(value)
    return found


def _tail(log: Path, offset: int) -> str:
    with log.open("rb") as source:
        source.seek(offset)
        return source.read(1 << 20)[-1500:].decode("utf-8", "replace")


def module(name: str, *words: str) -> list[str]:
    """Return the isolated command line of one of our programs."""
    return [sys.executable, "-I", "-m", name, *words]


def ask(argv: Sequence[str], *, what: str, wait_s: float = 60.0) -> str:
    """Run a local command of ours to its end and return its output.

    Raises the refusal that it printed on stderr, or Unavailable (``unavailable.command``).
    """
    try:
        done = subprocess.run(list(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/",
                              env=clean_environment(), timeout=wait_s, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{what} took longer than {wait_s:.0f} s", code="command") from None
    if done.returncode == 0:
        return done.stdout
    raise refusal_in(done.stderr + "\n" + done.stdout) or Unavailable(
        f"{what} ended with status {done.returncode}", code="command", details={"tail": done.stderr[-1500:]})


def refusal_in(text: str) -> Refusal | None:
    """Return the refusal in the last ``{"error": …}`` line of `text`."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and isinstance(value.get("error"), dict):
                return from_json(value["error"])
    return None


def end(program: Program, *, wait_s: float = 20.0) -> str:
    """End one program: SIGTERM, and SIGKILL after `wait_s` seconds. Return ``ended``, ``killed`` or ``gone``."""
    try:
        handle = os.pidfd_open(program.pid)
    except OSError:
        return "gone"
    try:
        if not program.lives:  # asked again with the handle open: the number may have been given away
            return "gone"
        for step, word, limit in ((signal.SIGTERM, "ended", wait_s), (signal.SIGKILL, "killed", 5.0)):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, step)
            if _over(handle, program, limit):
                return word
    finally:
        os.close(handle)
    raise Unavailable(f"{program.name} (pid {program.pid}) does not end", code="program",
                      next_step=f"look at /proc/{program.pid}/stack")


def _over(handle: int, program: Program, limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if select.select([handle], [], [], min(0.5, limit_s))[0] or not program.lives:
            child = _children.pop(program.pid, None)
            if child is not None:
                child.wait(limit_s + 1)
            return True
    return False
