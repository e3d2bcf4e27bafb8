"""What goes on by itself: catching up orders, late records, tree heads, pages, lost runs, trust of new officers.

Nothing here resumes anything, and the only runs that start are those whose plan says so (restarts.py). A job that
fails is named in `faults` (the status page shows it) and tried again; it never ends the others.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from control_plane import engines, lifecycle, restarts, trust_list
from control_plane.pager import Pager
from control_plane.parts import Parts
from control_plane.store import run_keys, sessions
from control_plane.store.db import now_us, reading, writing
from interlock.errors import Refusal
from interlock.event import Event, EventType

TICK_S = 0.25
KEPT_US = 7 * 86_400_000_000


def sequence(parts: Parts) -> int:
    """Move all waiting records into the tree and sign its head; one caller at a time. Returns how many."""
    moved = 0
    with parts.sequencing:
        while fresh := parts.ledger.sequence():
            moved += fresh
    return moved


def grow_trust(parts: Parts) -> None:
    """Pin officers who enrolled, while fewer than two are pinned; nodes get the list with their next heartbeat."""
    with reading(parts.engine) as connection:
        if trust_list.newest(connection).ready:
            return
    with writing(parts.engine) as connection:
        made = trust_list.grow(connection, parts.settings, now_us())
        if made is not None:
            parts.ledger.record(Event(EventType.TRUST_CHANGED, "control", facts={
                "version": made.version, "persons": [p["person"] for p in made.persons]}), connection)


def lose_silent(parts: Parts) -> None:
    """Show runs as lost whose node was not heard for long."""
    with reading(parts.engine) as connection:
        if not lifecycle.any_silent(connection):
            return
    with writing(parts.engine) as connection:
        lifecycle.lose_silent(connection)
    parts.bell.ring()


def look_for_keks(parts: Parts) -> None:
    """Make the first key-encryption key, or say that the one which wrapped what is kept is gone. Raises Conflict
    (``conflict.kek_state``)."""
    with reading(parts.engine) as connection:
        wrapped_by = run_keys.providers(connection)
    parts.keys.prepare(wrapped_by)


def forget_dead(parts: Parts) -> None:
    """Drop what sign-ins left behind a week ago: else anybody who can reach us fills the disk row by row."""
    with writing(parts.engine) as connection:
        sessions.forget(connection, now_us() - KEPT_US)


@dataclass
class Job:
    """Something to do every `every_s` seconds."""

    name: str
    every_s: float
    act: Callable[[], object]
    due: float = 0.0


@dataclass
class Ticker:
    """Runs the jobs in one thread, one after the other; `faults` maps a job's name to what failed last."""

    parts: Parts
    jobs: list[Job]
    faults: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Parts) -> "Ticker":
        """Return the ticker with all jobs."""
        pager = Pager(parts)
        faults: dict[str, str] = {}
        return cls(parts, [
            Job("orders", 1.0, parts.desk.catch_up), Job("records", TICK_S, parts.desk.record_late),
            Job("tree", 1.0, lambda: sequence(parts)), Job("pager", 0.5, pager.look),
            Job("lost", 5.0, lambda: lose_silent(parts)), Job("engines", 1.0, lambda: engines.keep_states(parts)),
            Job("makers", 1.0, lambda: engines.stop_makers(parts)),
            Job("trust", 2.0, lambda: grow_trust(parts)),
            Job("streams", 10.0, parts.ledger.watch_streams),
            Job("restarts", 0.5, lambda: restarts.turn(parts, faults)),
            Job("keys", 10.0, lambda: look_for_keks(parts)),
            Job("sign-ins", 3600.0, lambda: forget_dead(parts)),
        ], faults)

    def tick(self) -> None:
        """Do what is due now."""
        now = time.monotonic()
        for job in self.jobs:
            if job.due <= now:
                job.due = now + job.every_s
                self._do(job)

    def _do(self, job: Job) -> None:
        try:
            job.act()
        except Refusal as refusal:
            self.faults[job.name] = refusal.code
        except Exception as fault:  # one faulty job must not end the watch over stops
            self.faults[job.name] = type(fault).__name__
        else:
            self.faults.pop(job.name, None)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.to_thread(self.tick)
            await asyncio.sleep(TICK_S)
