"""The order log: an append-only list of signed orders OUTSIDE the database, which a restore cannot rewind.

Rules. An entry is a file ``NNNNNNNN-<id>.json``, made whole and only if absent, fsynced, never changed.
The same order twice is one entry. A resume takes its epoch as a key first (``epochs/N``, put-if-absent), so
two resumes cannot share one. Beside the orders lie the enrolled nodes (``nodes.json``) and the placements
(``placements.log``): a proof of a stop asks these, never the database (G9). A folder that does not answer is
the typed refusal ``unavailable.order_log``; nothing is granted then.
"""

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from interlock.canon import canonical, digest
from interlock.durable import write_new, write_over
from interlock.errors import Conflict, Malformed, Unavailable
from interlock.order import ResumeOrder, StopOrder
from interlock.signed import RESUME, STOP, Signed

_NAME = re.compile(r"^(\d{8})-([A-Za-z0-9_-]{1,64})\.json$")


@dataclass(frozen=True)
class Entry:
    """One signed order at its position. `stop` or `resume` is its body, the other None."""

    n: int
    signed: Signed
    stop: StopOrder | None
    resume: ResumeOrder | None

    @property
    def id(self) -> str:
        """Return the order's id."""
        return self.stop.id if self.stop else self.resume.id if self.resume else ""

    @property
    def epoch(self) -> int:
        """Return the order's epoch."""
        return self.stop.epoch if self.stop else self.resume.epoch if self.resume else 0


def entry(n: int, signed: Signed) -> Entry:
    """Parse the body of a signed stop or resume whose signature was verified; raises Malformed."""
    if signed.format == STOP:
        return Entry(n, signed, StopOrder.from_json(signed.body()), None)
    if signed.format == RESUME:
        return Entry(n, signed, None, ResumeOrder.from_json(signed.body()))
    raise Malformed("only stop and resume orders are kept here", code="format")


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"the order log does not answer: {error.strerror}", code="order_log",
            next_step="check the folder STATE/orders; stops are accepted meanwhile, nothing else",
        ) from None


class OrderLog:
    """The log in one folder. `_lock` guards appends; `_parsed` keeps entries by file name (immutable files)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._parsed: dict[str, Entry] = {}

    def create(self) -> None:
        """Make the empty log (at init only: a log that vanished later is refused, not made anew)."""
        with _reachable():
            self.folder.mkdir(mode=0o700, exist_ok=True)
            (self.folder / "epochs").mkdir(mode=0o700, exist_ok=True)
            if not (self.folder / "nodes.json").exists():
                self._write_nodes([])

    def entries(self) -> list[Entry]:
        """Return all entries by position, read from the folder now. Raises Unavailable or Malformed."""
        with _reachable():
            if not (self.folder / "epochs").is_dir():
                raise FileNotFoundError(2, "the folder is not there")
            names = sorted(n for n in os.listdir(self.folder) if _NAME.match(n))
            return [self._read(name) for name in names]

    def _read(self, name: str) -> Entry:
        found = self._parsed.get(name)
        if found is None:
            n = int(name[:8])
            try:
                found = entry(n, Signed.from_json(json.loads((self.folder / name).read_bytes())))
            except (UnicodeDecodeError, json.JSONDecodeError):
                raise Malformed(f"the order log's entry {name} cannot be read", code="order_log") from None
            self._parsed[name] = found
        return found

    def head(self) -> str:
        """Return the digest over all entries in order; an approval of a resume names it."""
        return head_of(self.entries())

    def append(self, signed: Signed) -> Entry:
        """Append a verified order once; returns its entry. Raises Unavailable or Conflict (epoch taken)."""
        with self._lock, _reachable():
            present = self.entries()
            made = entry(present[-1].n + 1 if present else 1, signed)
            for found in present:
                if found.id == made.id:
                    return found
            if made.resume is not None:
                self._take_epoch(made)
            write_new(self.folder / f"{made.n:08d}-{made.id}.json", canonical(signed.as_json()))
            return made

    def _take_epoch(self, made: Entry) -> None:
        try:
            write_new(self.folder / "epochs" / str(made.epoch), made.id.encode())
        except FileExistsError:
            raise Conflict("another resume has taken this epoch", code="epoch", next_step="try again") from None

    def top_epoch(self) -> int:
        """Return the highest epoch of any entry or any epoch that a resume took."""
        with _reachable():
            taken = [int(n) for n in os.listdir(self.folder / "epochs") if n.isdigit()]
        return max([0, *taken, *(e.epoch for e in self.entries())])

    # --- enrolled nodes and placements ------------------------------------------------------------
    def enrolled(self) -> list[dict[str, Any]]:
        """Return ``[{node, supervisor_key, signers}]`` of every node that ever joined."""
        with _reachable():
            raw = (self.folder / "nodes.json").read_bytes()
        try:
            rows = json.loads(raw)
            return [{"node": str(r["node"]), "supervisor_key": str(r["supervisor_key"]), "signers": list(r["signers"])}
                    for r in rows]
        except (ValueError, KeyError, TypeError):
            raise Malformed("the list of enrolled nodes cannot be read", code="order_log") from None

    def enrol(self, node: str, supervisor_key: str, signers: list[dict[str, str]]) -> None:
        """Append a node to the list. Raises Conflict (``conflict.node``) when that id ever joined before."""
        with self._lock:
            rows = self.enrolled()
            if any(r["node"] == node for r in rows):
                raise Conflict(f"the node {node} has joined before", code="node",
                               next_step="a reinstalled machine joins under a new node id")
            rows.append({"node": node, "supervisor_key": supervisor_key, "signers": signers})
            with _reachable():
                self._write_nodes(rows)

    def _write_nodes(self, rows: list[dict[str, Any]]) -> None:
        write_over(self.folder / "nodes.json", json.dumps(rows).encode())

    def place(self, run: str, attempt: int, node: str) -> None:
        """Note durably that an attempt goes to `node`, before the grant commits. Raises Unavailable."""
        line = json.dumps({"run": run, "attempt": attempt, "node": node}).encode() + b"\n"
        with self._lock, _reachable():
            append_line(self.folder / "placements.log", line)

    def placed(self, run: str) -> set[str]:
        """Return the nodes that ever held an attempt of `run`. Raises Unavailable."""
        path = self.folder / "placements.log"
        with _reachable():
            if not path.exists():
                return set()
            lines = path.read_bytes().splitlines()
        rows = [parsed for line in lines if (parsed := _line(line)) is not None]
        return {str(r["node"]) for r in rows if r.get("run") == run}


def head_of(entries: list[Entry]) -> str:
    """Return the digest over `entries` (position, id and digest of the signed bytes of each)."""
    return digest([[e.n, e.id, _digest(e.signed)] for e in entries])


@lru_cache(maxsize=1 << 16)
def _digest(signed: Signed) -> str:
    return digest(signed.as_json())


def append_line(path: Path, line: bytes) -> None:
    """Append one line and fsync it; a torn line of an earlier crash is closed off first. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(fd, line) != len(line):
            raise OSError(28, "the line was written in part")
        os.fsync(fd)
    finally:
        os.close(fd)


def _line(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return None  # torn by a crash: its write was never acknowledged
    return value if isinstance(value, dict) else None


class AcceptedList:
    """This replica's own list of the orders it accepted (``accepted.log``), fsynced before the acknowledgement.

    A line that cannot be read was torn by a crash before its acknowledgement and counts for nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._orders: dict[str, Signed] = {}
        self._stops: dict[str, StopOrder] = {}
        for line in path.read_bytes().splitlines() if path.exists() else []:
            value = _line(line)
            if value is not None:
                signed = Signed.from_json(value)
                self._put(entry(0, signed))

    def _put(self, found: Entry) -> None:
        self._orders[found.id] = found.signed
        if found.stop is not None:
            self._stops[found.id] = found.stop

    def append(self, signed: Signed) -> None:
        """Add an order durably; the same one twice is one line. Raises OSError."""
        found = entry(0, signed)
        with self._lock:
            if found.id not in self._orders:
                self._put(found)  # counts against grants even when the disk refuses it
                append_line(self._path, canonical(signed.as_json()) + b"\n")

    def stops(self) -> dict[str, StopOrder]:
        """Return id → stop of all that this replica accepted."""
        with self._lock:
            return dict(self._stops)

    def orders(self) -> dict[str, Signed]:
        """Return id → signed order of all that this replica accepted."""
        with self._lock:
            return dict(self._orders)
