"""Stop with the supervisor dead or hung: a file latch, then both primitives from this very process.

The latch makes the stop stick (the supervisor finds the file when it comes back), the direct kill makes it
take effect now. What is on the books and what lies in the tree are both looked at; CONFIRMED needs the
removal of every group, as always.
"""

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlock.canon import parse
from interlock.durable import write_over
from interlock.errors import Refusal, Unavailable
from interlock.order import Result
from interlock.permit import boottime_ms
from killswitch.ladder import LIMIT_MS, Outcome, climb
from killswitch.latch import drop
from killswitch.store import Entry, boot_id, noted_groups, removed_note
from killswitch.verify import Target
from sandbox.cgroup import Group

LATCH_S = 1.0


@dataclass(frozen=True)
class Found:
    """A group to end: its name and where it lies."""

    name: str
    group: Group


def stop(state: Path, run: str | None, limit_ms: int = LIMIT_MS) -> dict[str, Any]:
    """Latch and kill without the supervisor; return what `stop --json` prints.

    `run` None means everything of this host. Raises Unavailable (``unavailable.state``) when there is no
    supervisor state, or (``unavailable.root``) without root.
    """
    if os.geteuid() != 0:
        raise Unavailable("to stop without the supervisor needs root", code="root", next_step="repeat this as root")
    folder = state / "supervisor"
    started = boottime_ms()
    if not folder.is_dir():
        raise Unavailable(f"no supervisor state in {folder}", code="state",
                          next_step="name the state with --state, as root")
    latch = _latch(folder / "latch", run)
    targets = _targets(folder, run)
    end = started + limit_ms
    outcomes = {t.name: climb(Target(t.group), limit_ms=max(200, end - boottime_ms())) for t in targets}
    for name in (n for n, o in outcomes.items() if o.removed):
        with suppress(OSError):
            write_over(removed_note(folder, name), b"")
    return _report(latch, outcomes, boottime_ms() - started)


def _latch(folder: Path, run: str | None) -> str:
    """Return the path of the latch file, "" when it could not be made in time.

    A disk that is full or hangs keeps nobody from killing; it is said, and nothing is called confirmed.
    """
    made: list[str] = []

    def act() -> None:
        with suppress(OSError):
            made.append(str(drop(folder, run)))

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(LATCH_S)
    return made[0] if made else ""


def _report(latch: str, outcomes: dict[str, Outcome], latency_ms: int) -> dict[str, Any]:
    dead = all(o.result is Result.CONFIRMED for o in outcomes.values())
    result = Result.CONFIRMED if dead and latch else Result.NOT_CONFIRMED
    reasons = sorted({o.why for o in outcomes.values() if o.why} | (set() if latch else {"not latched"}))
    return {
        "result": result.value, "supervisor": "no answer", "by": "direct", "latch": latch,
        "runs": sorted(outcomes), "killed": sum(o.found for o in outcomes.values()), "latency_ms": latency_ms,
        "why": ", ".join(reasons), "survivors": [s.as_json() for o in outcomes.values() for s in o.survivors][:64],
    }


def _targets(folder: Path, run: str | None) -> list[Found]:
    """Return the groups that the books and the tree name, each once."""
    found = {e.name: Found(e.name, Group(e.name, e.groups)) for e in _open_entries(folder) if run in (None, e.run)}
    for group in noted_groups(folder):
        if run is None or group.id.rpartition(".")[0] == run:
            found.setdefault(group.id, Found(group.id, group))
    return [found[name] for name in sorted(found) if found[name].group.paths]


def _open_entries(folder: Path) -> list[Entry]:
    entries = []
    for path in sorted((folder / "runs").glob("*.json")):
        with suppress(OSError, Refusal, KeyError, TypeError, ValueError):
            entry = Entry.from_json(parse(path.read_bytes()))
            if not entry.closed and entry.boot_id == boot_id():
                entries.append(entry)
    return entries


def poll(ask: Any, order: str, wait_s: float) -> dict[str, Any]:
    """Ask for the receipt of `order` until it is final or `wait_s` seconds are over."""
    end = time.monotonic() + wait_s
    while True:
        found: dict[str, Any] = ask("receipts", order=order)
        if found["result"] != "pending" or time.monotonic() >= end:
            return found
        time.sleep(0.02)
