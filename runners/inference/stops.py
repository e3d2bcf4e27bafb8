"""Is this call stopped? Asked at the gate, right before an engine is asked, and at each piece of an answer."""

from collections.abc import Callable

from interlock.errors import Halted
from interlock.order import Labels, StopOrder
from interlock.permit import boottime_ms
from killswitch.page import StopPage

STALE = "stale"
AGAIN_MS = 200


class Stops:
    """The stop page, for one gateway.

    A page that cannot be trusted takes the reader a while to judge, since it looks several times; that answer is kept
    for `AGAIN_MS`, so that a stale page does not hold up the calls that it ends.
    """

    def __init__(self, page: StopPage, now_ms: Callable[[], int] = boottime_ms) -> None:
        self._page, self._now_ms = page, now_ms
        self._stale: StopOrder | None = None
        self._until_ms = 0

    def epoch(self) -> int:
        """Return the present stop epoch."""
        return self._page.epoch()

    def covering(self, *labels: Labels) -> StopOrder | None:
        """Return an active stop that covers one of `labels`, or None."""
        stale = self._stale  # read once: the gate asks from threads
        if stale is not None and self._now_ms() < self._until_ms:
            return stale
        for each in labels:
            order = self._page.stopped(each)
            if order is not None:
                self._stale = order if order.id == STALE else None
                self._until_ms = self._now_ms() + AGAIN_MS
                return order
        self._stale = None
        return None


def halted(order: StopOrder) -> Halted:
    """Return the refusal of a call that a stop cut."""
    return Halted(f"stopped by {order.actor}: {order.reason or 'no reason given'}",
                  next_step="two safety officers can lift this very stop with interlock resume",
                  details={"order": order.id, "scope": str(order.scope)})
