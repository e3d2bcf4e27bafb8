"""What is stopped on this host, as a pure value: no clock, no disk, no network.

Rules (protocol.md §2, §3):
1. Stops are a set. A stop is never refused for its epoch or age; it only raises the floor (G1).
2. The one stop without effect is one whose id a resume has cleared.
3. A resume removes exactly the ids that it names; a stop beside it stays (G2).
4. `stopped` is asked at each admission, GO and lease, so it also covers runs that appear later.
5. `epoch` counts local changes and never goes back; it is what permits and the stop page carry. The
   `floors` are epochs of the control plane, one a scope.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from interlock.canon import digest
from interlock.order import Labels, ResumeOrder, StopOrder


@dataclass
class StopState:
    """The stop set. The owner (supervisor) holds the lock; everything here is plain data."""

    stops: dict[str, StopOrder] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)
    floors: dict[str, int] = field(default_factory=dict)
    epoch: int = 0

    def apply_stop(self, order: StopOrder) -> bool:
        """Add a stop; return False when it changes nothing (known already, or cleared)."""
        if order.id in self.cleared:
            return False
        if order.id in self.stops:
            return False
        self.stops[order.id] = order
        self._raise(str(order.scope), order.epoch)
        self.epoch += 1
        return True

    def apply_resume(self, order: ResumeOrder) -> list[StopOrder]:
        """Lift exactly the stops that `order` names; return those that were active.

        Ids that were never seen count as cleared too: the order of arrival does not matter.
        """
        lifted = [self.stops.pop(i) for i in order.clears if i in self.stops]
        for stop in lifted:
            self._raise(str(stop.scope), order.epoch)
        if not set(order.clears) <= self.cleared:
            self.epoch += 1
        self.cleared.update(order.clears)
        return lifted

    def adopt(self, cleared: Iterable[str], epoch: int) -> None:
        """Take over what a snapshot says about the past. Only for a host without a state of its own:
        nothing runs on it, so the floor of everything may rise (G16). Active stops stay."""
        self.cleared.update(set(cleared) - set(self.stops))
        self._raise("everything", epoch)
        self.epoch += 1

    def stopped(self, labels: Labels) -> StopOrder | None:
        """Return one active stop that covers `labels`, or None."""
        return next((s for s in self.stops.values() if s.scope.matches(labels)), None)

    def floor(self, labels: Labels) -> int:
        """Return the lowest epoch of a permit or lease that these labels may still use."""
        names = (
            "everything", f"tenant:{labels.tenant}", f"run:{labels.run}", f"node:{labels.node}",
            f"subject:{labels.subject}", f"subject:{labels.owner}", f"model:{labels.model}",
            *(f"model:{m}" for m in labels.lineage),
        )
        return max((self.floors.get(n, 0) for n in names), default=0)

    @property
    def top(self) -> int:
        """Return the highest epoch of the control plane that this host has seen."""
        return max(self.floors.values(), default=0)

    def digest(self) -> str:
        """Return the digest of the two sets, which a heartbeat carries: the control plane compares it with
        `digest_of` over its own."""
        return digest_of(self.stops, self.cleared)

    def _raise(self, scope: str, epoch: int) -> None:
        self.floors[scope] = max(epoch, self.floors.get(scope, 0))


def digest_of(stops: Iterable[str], cleared: Iterable[str]) -> str:
    """Return the digest of the ids of active and of cleared stops."""
    return digest({"stops": sorted(stops), "cleared": sorted(cleared)})
