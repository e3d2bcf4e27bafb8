"""Proof that a run is dead, measured, never inferred (killswitch.md §4, guard G14).

CONFIRMED needs all of: every control group of the run removed by rmdir in every hierarchy (the kernel
answers EBUSY while anything lives, and nothing can be put in afterwards) · run init exited, seen through
its pidfd · no living process with the run's uid. "populated 0" alone is no proof: a spawn may follow it.
"""

import os
import select
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.cgroup import Group

RUN_UIDS = range(60_100, 61_000)


@dataclass(frozen=True)
class Target:
    """What a stop works on. `pidfd` of run init and `uid` are None while nothing was spawned."""

    group: Group
    pidfd: int | None = None
    uid: int | None = None


@dataclass(frozen=True)
class Survivor:
    """A process that still lives: pid, state letter, and what it waits for in the kernel."""

    pid: int
    state: str
    wchan: str

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object for receipts and the command hook."""
        return {"pid": self.pid, "state": self.state, "wchan": self.wchan}


def exited(pidfd: int) -> bool:
    """Return whether the process behind `pidfd` has exited (a zombie counts as exited)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def state_of(pid: int) -> str:
    """Return the state letter of /proc/PID/stat, "" when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def look_at(pid: int) -> Survivor | None:
    """Return what keeps `pid` alive; None when it is gone or only waits to be reaped."""
    state = state_of(pid)
    if state in ("", "Z", "X"):
        return None
    try:
        wchan = Path(f"/proc/{pid}/wchan").read_text().strip("\0\n")
    except OSError:
        wchan = ""
    return Survivor(pid, state, "" if wchan == "0" else wchan[:64])


def uid_of(pid: int) -> int | None:
    """Return the real uid of a process, None when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def with_uid(uid: int) -> list[Survivor]:
    """Return the living processes of a run's uid, wherever they are."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and uid_of(int(name)) == uid:
            survivor = look_at(int(name))
            if survivor is not None:
                found.append(survivor)
    return found


def survivors(target: Target) -> list[Survivor]:
    """Return everything of the run that still lives, by group and by uid, each once."""
    found = {s.pid: s for s in map(look_at, target.group.pids()) if s is not None}
    if target.uid is not None:
        found.update({s.pid: s for s in with_uid(target.uid)})
    return [found[pid] for pid in sorted(found)]


def removed(target: Target) -> bool:
    """Remove the group from every hierarchy; return whether that succeeded, which is the proof."""
    try:
        target.group.remove()
    except OSError:
        return False
    return not target.group.exists()


def proven(target: Target) -> str:
    """Return "" when the run is proven dead, else what is missing: ``group``, ``init`` or ``uid``."""
    if not removed(target):
        return "group"
    if target.pidfd is not None and not exited(target.pidfd):
        return "init"
    if target.uid is not None and with_uid(target.uid):
        return "uid"
    return ""
