"""Latched orders on disk: durable before any effect or receipt (G17), also on a full disk.

Invariants of `STATE/supervisor/orders/`:
1. A stop is in force when its file `<name>.stop` is there and no resume file names its id. Presence is the
   signal, not content: a file that cannot be read stops everything on this node.
2. Room is made in advance: `spare-NN` files of written zeros. A latch overwrites one, fsyncs it and
   renames it; that needs neither a new block nor a new inode.
3. Nothing is ever deleted here. The number of records is the change epoch after a restart.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlock.canon import canonical, parse
from interlock.durable import sync_folder, write_over
from interlock.errors import Malformed, Refusal
from interlock.order import Mode, ResumeOrder, Scope, ScopeKind, StopOrder
from interlock.signed import Signed

SPARE_BYTES = 8192
SPARES = 32
_SAFE = re.compile(r"^[a-zA-Z0-9_]{1,64}$")


@dataclass(frozen=True)
class Latched:
    """One latched order. `local` says that it was made on this host (the control plane may not know it)."""

    order: StopOrder | ResumeOrder
    signed: Signed | None
    local: bool
    boot_id: str
    at_ms: int

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object on disk."""
        return {
            "order": self.order.as_json(), "signed": self.signed.as_json() if self.signed else None,
            "local": self.local, "boot_id": self.boot_id, "at_ms": self.at_ms,
        }


class LatchBook:
    """The folder of latched orders. One writer: the supervisor that holds the lock of the state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.identity():
            with suppress(OSError):  # without it nothing counts as complete, so nothing is admitted
                write_over(folder / "born", b"")
        self.refill()

    def refill(self) -> int:
        """Make missing spare files as far as the disk allows; return how many are there."""
        for number in range(SPARES):
            path = self.folder / f"spare-{number:02}"
            if not path.exists():
                try:
                    write_over(path, bytes(SPARE_BYTES))
                except OSError:
                    break
        return len(self._spares())

    def latch_stop(self, latched: Latched) -> None:
        """Make a stop durable; returns only when it is. Raises OSError when not even its presence can be."""
        target = self.folder / f"{_file_name(latched.order.id)}.stop"
        data = canonical(latched.as_json())
        spares = self._spares()
        if not spares:
            write_over(target, data)
            return
        self._fill(spares[0], data)
        os.rename(spares[0], target)
        sync_folder(self.folder)
        self.refill()

    def latch_resume(self, latched: Latched) -> None:
        """Make a resume durable. Raises OSError; then nothing is lifted."""
        write_over(self.folder / f"{_file_name(latched.order.id)}.resume", canonical(latched.as_json()))

    def stops(self, node: str) -> Iterator[Latched]:
        """Yield every stop ever latched; one that cannot be read covers the whole of `node`."""
        for path in sorted(self.folder.glob("*.stop")):
            try:
                yield _read(path, StopOrder)
            except (OSError, Refusal, KeyError, TypeError, ValueError):
                yield _unreadable(path, node)

    def resumes(self) -> Iterator[Latched]:
        """Yield every resume; one that cannot be read lifts nothing."""
        for path in sorted(self.folder.glob("*.resume")):
            with suppress(OSError, Refusal, KeyError, TypeError, ValueError):
                yield _read(path, ResumeOrder)

    def identity(self) -> str:
        """Return what no other folder has, a copy brought back from a backup included; empty when unknown.

        An inode number is used again after a deletion, its time of change is not.
        """
        try:
            born = (self.folder / "born").stat()
        except OSError:
            return ""
        return f"{born.st_ino}.{born.st_ctime_ns}"

    def _spares(self) -> list[Path]:
        return sorted(self.folder.glob("spare-*"))

    @staticmethod
    def _fill(spare: Path, data: bytes) -> None:
        fd = os.open(spare, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            with suppress(OSError):  # longer than the spare on a full disk: presence alone is the signal
                os.pwrite(fd, data.ljust(SPARE_BYTES, b"\n"), 0)
            os.fsync(fd)
        finally:
            os.close(fd)


def _file_name(id_: str) -> str:
    return id_ if _SAFE.match(id_) else "h-" + hashlib.sha256(id_.encode()).hexdigest()


def _read(path: Path, kind: type[StopOrder] | type[ResumeOrder]) -> Latched:
    value = parse(path.read_bytes().rstrip(b"\n"))
    signed = value["signed"]
    if not isinstance(value["local"], bool):
        raise Malformed("a latched order is off")
    return Latched(
        kind.from_json(value["order"]), Signed.from_json(signed) if signed is not None else None,
        value["local"], str(value["boot_id"]), int(value["at_ms"]),
    )


def _unreadable(path: Path, node: str) -> Latched:
    order = StopOrder(
        path.stem, Scope(ScopeKind.NODE, node), Mode.KILL, 0, "supervisor", "a latch that cannot be read"
    )
    return Latched(order, None, True, "", 0)
