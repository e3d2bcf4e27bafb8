"""What the supervisor knows after a restart: `STATE/supervisor/`, mode 0700.

    supervisor.key  trust.json  settings.json  lock  tree.json      (see their rooms)
    orders/         latched orders (latchbook.py)
    runs/           one file an attempt, made with O_EXCL: an attempt is never used again
    latch/          the operator's file latch
    complete        written after a SNAPSHOT answered our nonce; without it nothing is admitted (G16)

Leases and deadlines are never written here, so none can be read back (G15). `complete` names the birth of
`orders/`: a folder that was wiped or brought back from a backup is not complete.
"""

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.canon import canonical, parse
from interlock.durable import sync_folder, write_over
from interlock.errors import Conflict, Malformed, Refusal, Unavailable, Untrusted
from interlock.keyfile import read_ed25519, write_ed25519
from interlock.order import Labels, ResumeOrder, StopOrder
from killswitch.latchbook import LatchBook, Latched
from killswitch.state import StopState
from sandbox.cgroup import Group


@dataclass(frozen=True)
class Entry:
    """One attempt in the registry. `groups` hierarchy → path; `closed` is why it ended, "" while open."""

    run: str
    attempt: int
    labels: Labels
    epoch: int
    boot_id: str
    groups: dict[str, str]
    closed: str = ""

    @property
    def name(self) -> str:
        """Return ``RUN.ATTEMPT``."""
        return f"{self.run}.{self.attempt}"

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object on disk."""
        return {
            "run": self.run, "attempt": self.attempt, "labels": self.labels.as_json(), "epoch": self.epoch,
            "boot_id": self.boot_id, "groups": self.groups, "closed": self.closed,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Entry":
        """Parse `as_json`; raises Malformed, KeyError."""
        groups = value["groups"]
        if not isinstance(groups, dict):
            raise Malformed("groups of a registry entry are off")
        return cls(
            str(value["run"]), int(value["attempt"]), Labels.from_json(value["labels"]), int(value["epoch"]),
            str(value["boot_id"]), {str(k): str(v) for k, v in groups.items()}, str(value["closed"]),
        )


def boot_id() -> str:
    """Return the kernel's boot id (32 hex digits)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


class Store:
    """The supervisor's disk. One process at a time holds it (flock); not thread-safe by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.latch = folder / "latch"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise Untrusted(f"{folder} belongs to somebody else", code="state", next_step="name the right --state")
        os.chmod(folder, 0o700)
        self._lock = _lock(folder / "lock")
        for path in (self.runs, self.latch):
            path.mkdir(mode=0o700, exist_ok=True)
        self.book = LatchBook(folder / "orders")
        self.key = self._key()

    def close(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _key(self) -> Ed25519PrivateKey:
        path = self.folder / "supervisor.key"
        if not path.exists() and (self.folder / "trust.json").exists():
            raise Conflict("this node has joined, but its supervisor key is gone: nobody would believe its receipts",
                           code="half_made", next_step=f"restore {path} from a backup, or join under a new node id")
        if not path.exists():
            with suppress(Conflict):  # the join may make it at the same moment
                write_ed25519(path, Ed25519PrivateKey.generate())
        return read_ed25519(path)

    def load(self, node: str) -> tuple[StopState, list[Latched]]:
        """Return the stop state that the latched orders make, and the orders themselves."""
        state = StopState()
        stops, resumes = list(self.book.stops(node)), list(self.book.resumes())
        for item in stops:
            if isinstance(item.order, StopOrder):
                state.apply_stop(item.order)
        for item in resumes:
            if isinstance(item.order, ResumeOrder):
                state.apply_resume(item.order)
        past = self._complete() or {}
        if past:
            state.adopt(past["cleared"], past["epoch"])
        state.epoch = len(stops) + len(resumes) + 1
        return state, stops + resumes

    def _complete(self) -> dict[str, Any] | None:
        try:
            value = parse((self.folder / "complete").read_bytes())
            cleared, epoch, orders = value["cleared"], value["epoch"], value["orders"]
        except (OSError, Refusal, KeyError, TypeError):
            return None
        if not orders or orders != self.book.identity() or not isinstance(epoch, int) or not isinstance(cleared, list):
            return None
        return {"cleared": [str(c) for c in cleared], "epoch": epoch}

    @property
    def complete(self) -> bool:
        """Return whether a snapshot was taken over into exactly this folder of orders."""
        return self._complete() is not None

    def set_complete(self, cleared: Iterable[str], epoch: int) -> None:
        """Note that a snapshot answered our nonce; raises OSError."""
        body = {"cleared": sorted(cleared), "epoch": epoch, "orders": self.book.identity()}
        write_over(self.folder / "complete", canonical(body))

    def forget_complete(self) -> None:
        """Admit nothing until the next snapshot: for a stop that could not be made durable."""
        with suppress(FileNotFoundError):
            (self.folder / "complete").unlink()
        with suppress(OSError):
            sync_folder(self.folder)

    def register(self, entry: Entry) -> None:
        """Put a new attempt on the books, durably.

        Raises Conflict (``conflict.attempt``) when it was ever used, Unavailable (``unavailable.disk``).
        """
        path = self.runs / f"{entry.name}.json"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise Conflict(
                f"attempt {entry.name} was used before", code="attempt", next_step="ask for a new attempt"
            ) from None
        except OSError as error:
            raise _disk(error) from None
        try:
            with os.fdopen(fd, "wb") as out:
                out.write(canonical(entry.as_json()))
                out.flush()
                os.fsync(out.fileno())
            sync_folder(self.runs)
        except OSError as error:
            raise _disk(error) from None  # the name stays taken: better a lost attempt than one used twice

    def update(self, entry: Entry) -> None:
        """Rewrite an open attempt (its groups are known now); raises OSError."""
        write_over(self.runs / f"{entry.name}.json", canonical(entry.as_json()))

    def close_entry(self, entry: Entry, why: str) -> Entry:
        """Close an attempt on the books (best effort on a full disk: the sweep at start closes it then)."""
        closed = replace(entry, closed=why)
        with suppress(OSError):
            write_over(self.runs / f"{entry.name}.json", canonical(closed.as_json()))
        return closed

    def was_removed(self, name: str) -> bool:
        """Return whether a ladder outside the supervisor noted that it removed the groups of ``RUN.ATTEMPT``."""
        return removed_note(self.folder, name).exists()

    def entries(self) -> list[Entry]:
        """Return every attempt ever registered; one that cannot be read is skipped but stays used."""
        found = []
        for path in sorted(self.runs.glob("*.json")):
            with suppress(OSError, Refusal, KeyError, TypeError, ValueError):
                found.append(Entry.from_json(parse(path.read_bytes())))
        return found

    def write(self, name: str, data: bytes) -> None:
        """Replace a small file of the folder durably; raises OSError."""
        write_over(self.folder / name, data)


def removed_note(folder: Path, name: str) -> Path:
    """Return the file by which the direct way (offline.py) says that the groups of ``RUN.ATTEMPT`` are gone:
    a group that is missing is then no riddle."""
    return folder / "runs" / f"{name}.removed"


def noted_groups(folder: Path) -> list[Group]:
    """Return the groups in the tree that the last supervisor of this state noted; none when it noted none."""
    try:
        paths: dict[str, str] = parse((folder / "tree.json").read_bytes())["paths"]
    except (OSError, Refusal, KeyError, TypeError):
        return []
    names = {child.name for p in paths.values() for child in Path(p, "runs").glob("*") if child.is_dir()}
    return [Group(n, {key: f"{p}/runs/{n}" for key, p in paths.items()}) for n in sorted(names)]


def _disk(error: OSError) -> Unavailable:
    return Unavailable(
        f"the books cannot be written: {error.strerror}", code="disk", next_step="make room on the state's disk"
    )


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Conflict(
            "a supervisor runs on this state already", code="second_start",
            next_step="ask it: python -I -m killswitch status",
        ) from None
    return fd
