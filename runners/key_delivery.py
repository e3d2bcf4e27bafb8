"""Keys of one attempt: fetched from the control plane once the attempt lives, handed to the broker, kept nowhere here.

A thread of the launcher runs `deliver`. Until it has succeeded the broker answers ``unavailable.keys`` and the guest
waits; training goes on meanwhile.
"""

import threading
from contextlib import suppress

from interlock.errors import NotRecorded, Refusal, Stale, Unavailable
from interlock.event import EventType
from interlock.order import LaunchOrder
from runners.station import Station
from runners.vault import newest_of, read_keys

PAUSE_S = 1.0


def deliver(station: Station, order: LaunchOrder, stop: threading.Event) -> None:
    """Fetch the keys of the attempt and hand them to the broker; return when done, refused, or `stop` is set.

    Asks again every second while control plane or broker do not answer, and while the control plane has not granted
    a lease since its own start. Any other refusal is recorded, and ends it: the run goes on without keys. Raises
    nothing.
    """
    while not stop.is_set():
        try:
            answer = station.upstream.keys(order.run, order.attempt)
            run_key, files = read_keys(answer)
            station.broker().keys(order.run, order.attempt, run_key, files, newest=newest_of(answer))
            return
        except Refusal as refusal:
            if passes(refusal):
                stop.wait(PAUSE_S)
                continue
            if not stop.is_set():
                with suppress(Refusal):
                    station.record(EventType.RUN_KEY_REFUSED, order, {"code": refusal.code})
            return


def passes(refusal: Refusal) -> bool:
    """Return whether the same question may get another answer a second later."""
    return isinstance(refusal, Unavailable | Stale | NotRecorded) or refusal.code == "denied.lease"
