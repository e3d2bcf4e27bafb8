"""What is stopped and whether anything may be granted: a pure value made of three lists.

Rules (protocol.md §4):
1. G4: nothing is granted while the database lacks an order of the order log (it was restored from a backup),
   or holds it under another epoch.
2. G5: nothing is granted while the order log lacks an order that this replica accepted.
3. A stop counts wherever it is found: order log, database or accepted list. A resume counts only when the
   order log holds it, so a changed database lifts nothing.
4. G7: a permit older than the last order that matched its run, stop or resume, gets no lease.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from control_plane.order_log import Entry, head_of
from interlock.order import Labels, ResumeOrder, StopOrder


@dataclass(frozen=True)
class Standing:
    """One look at all three lists. `why` names what keeps grants back, empty when nothing does."""

    why: str
    epoch: int
    head: str
    stops: Mapping[str, StopOrder]
    cleared: frozenset[str]
    resumes: tuple[ResumeOrder, ...]

    @property
    def grant_ok(self) -> bool:
        """Return whether a permit, lease or resume may be given at all."""
        return self.why == ""

    @property
    def active(self) -> list[StopOrder]:
        """Return the stops that no resume has lifted."""
        return [s for i, s in self.stops.items() if i not in self.cleared]

    def stopped(self, labels: Labels) -> StopOrder | None:
        """Return one active stop that covers `labels`, or None."""
        return next((s for s in self.active if s.scope.matches(labels)), None)

    def last_epoch(self, labels: Labels) -> int:
        """Return the epoch of the newest order, stop or resume, that matched a run with these labels."""
        matched = {i: s.epoch for i, s in self.stops.items() if s.scope.matches(labels)}
        lifting = [r.epoch for r in self.resumes if any(i in matched for i in r.clears)]
        return max([0, *matched.values(), *lifting])

    def permit_too_old(self, permit_epoch: int, labels: Labels) -> bool:
        """Return whether a permit of that epoch is older than an order that matched its run (G7)."""
        return permit_epoch < self.last_epoch(labels)


def look(
    log: list[Entry] | None, last_log: list[Entry], database: Mapping[str, tuple[int, int]],
    database_stops: Iterable[StopOrder], accepted: Mapping[str, StopOrder],
) -> Standing:
    """Return the standing.

    Args: `log` the order log as read now, None when it does not answer (`last_log`, the last good reading,
    then tells what is stopped); `database` id → (position, epoch) of the copy; `accepted` this replica's list.
    """
    entries = last_log if log is None else log
    stops = {s.id: s for s in [*database_stops, *accepted.values(), *(e.stop for e in entries if e.stop)]}
    resumes = tuple(e.resume for e in entries if e.resume)
    epochs = [*(e.epoch for e in entries), *(s.epoch for s in stops.values()), *(e for _, e in database.values())]
    return Standing(
        _withheld(log, database, accepted), max([0, *epochs]), head_of(entries), stops,
        frozenset(i for r in resumes for i in r.clears), resumes,
    )


def _withheld(
    log: list[Entry] | None, database: Mapping[str, tuple[int, int]], accepted: Mapping[str, StopOrder]
) -> str:
    if log is None:
        return "order_log"
    if any(database.get(e.id) != (e.n, e.epoch) for e in log):
        return "recovering"
    if not accepted.keys() <= {e.id for e in log}:
        return "unanchored"
    return ""
